# The package on a CPU: torch without CUDA first and alone, then the wheel of this tree with the versions that are tested.
#   docker build -t flexgen-h2o .
#   docker run --rm -v "$PWD:/work" -v flexgen-h2o:/home/flexgen flexgen-h2o run-batch -i in.jsonl -o out.jsonl --model M
#   docker run --rm -v flexgen-h2o:/home/flexgen flexgen-h2o cache --fetch smollm2-135m
# The volume keeps the offload dir, the hub's cache, the profile and compiled loops; /work must be writable for uid 1000.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY constraints.txt LICENSE MANIFEST.in README.md pyproject.toml setup.py ./
COPY flexgen_h2o flexgen_h2o
COPY policies policies
RUN pip install --no-cache-dir setuptools==84.2.1 \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist .

FROM python:3.11-slim-bookworm
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
COPY --from=build /dist /dist
COPY constraints.txt /dist/
RUN pip install --no-cache-dir -c /dist/constraints.txt "$(echo /dist/*.whl)[gguf]" \
    && useradd --uid 1000 --create-home flexgen
USER 1000
WORKDIR /work
ENTRYPOINT ["flexgen-h2o"]
CMD ["--help"]
