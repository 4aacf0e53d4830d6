"""Define the console command `flexgen-h2o VERB ...`.

It passes the rest of the line to the verb's module, which is imported only then.
"""

from __future__ import annotations

import difflib
import importlib
import signal
import sys

import flexgen_h2o
from flexgen_h2o import synonyms
from flexgen_h2o.cli_common import called_as
from flexgen_h2o.core.errors import EXIT_DONE, EXIT_USAGE, SIGNAL_BASE
from flexgen_h2o.core.units import aligned

# verb -> (module with `main(argv) -> int`, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "generate": (
        "flexgen_h2o.generate",
        "answer prompts: print the answers, or write them to a file, resumably",
    ),
    "chat": ("flexgen_h2o.chat", "talk to a model"),
    "serve": ("flexgen_h2o.serve", "answer OpenAI's clients, and run their batches"),
    "plan": (
        "flexgen_h2o.policy_search",
        "say what fits, what limits the speed and how long it takes, before a run",
    ),
    "doctor": ("flexgen_h2o.doctor", "list what would slow down or stop a run on this machine"),
    "hardware": ("flexgen_h2o.hardware", "measure this machine, so that plans can be relied on"),
    "cache": ("flexgen_h2o.cache", "list, fetch and remove weights that are kept for later runs"),
    "evaluate": (
        "flexgen_h2o.evaluate",
        "measure what a smaller KV cache costs; repeat the papers' experiments",
    ),
    "bench": (
        "flexgen_h2o.flex_opt",
        "run FlexGen's benchmark: prompts and answers of fixed lengths",
    ),
    "run": ("flexgen_h2o.generate", "another name of generate"),
    "eval": ("flexgen_h2o.evaluate", "another name of evaluate"),
    "batch": ("flexgen_h2o.batch", "generate -i FILE -o OUT, as older scripts call it"),
    "run-batch": ("flexgen_h2o.batch", "the same, as vLLM calls it"),
    "complete": (
        "flexgen_h2o.complete",
        "generate -p TEXT with raw text, as older scripts call it",
    ),
    "flex-opt": ("flexgen_h2o.flex_opt", "bench, as FlexGen calls it; also answers --prompts FILE"),
}


OTHER_NAMES = list(VERBS).index("run")  # the first of the other names


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    args = sys.argv[1:] if argv is None else argv
    if not args:
        print(_usage(), file=sys.stderr)
        return EXIT_USAGE
    verb, *rest = args
    if verb in ("-h", "--help", "--version") and rest:
        print(f"flexgen-h2o: {verb} stands alone, without {rest[0]!r}", file=sys.stderr)
        return EXIT_USAGE
    if verb in ("-h", "--help"):
        print(_usage())
        return EXIT_DONE
    if verb == "--version":
        print(f"flexgen-h2o {flexgen_h2o.__version__}")
        return EXIT_DONE
    if verb not in VERBS:
        print(
            f"flexgen-h2o: unknown verb {verb!r}; {_nearest(verb)}known: {', '.join(VERBS)}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    try:
        module = importlib.import_module(VERBS[verb][0])
    except KeyboardInterrupt:  # from here on the command handles signals
        print(f"flexgen-h2o {verb}: ended by SIGINT", file=sys.stderr)
        return SIGNAL_BASE + signal.SIGINT
    with called_as(verb):
        code: int = module.main(rest)
    return code


def _nearest(word: str) -> str:
    """Return a hint: the verb that may be meant, by its name, its module's or another program's."""
    by_name = {module.rpartition(".")[2]: verb for verb, (module, _) in reversed(VERBS.items())}
    by_name |= {verb: verb for verb in VERBS}
    same = synonyms.VERBS.get(word)
    if same is None:
        same = next(
            (
                by_name[near]
                for near in difflib.get_close_matches(word.replace("-", "_"), by_name, n=1)
            ),
            None,
        )
    return f"did you mean {same}? " if same else ""


def _usage() -> str:
    lines = [f"  {line}" for line in aligned([(verb, text) for verb, (_, text) in VERBS.items()])]
    verbs = "\n".join([*lines[:OTHER_NAMES], "", "Other names:", *lines[OTHER_NAMES:]])
    return (
        f"usage: flexgen-h2o VERB ... | --help | --version\n\n{verbs}\n\n"
        "flexgen-h2o VERB --help lists the flags of a verb. To begin: flexgen-h2o generate "
        'smollm2-135m -p "Hello!"'
    )


if __name__ == "__main__":
    sys.exit(main())
