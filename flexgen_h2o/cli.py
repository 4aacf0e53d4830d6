"""The console command `flexgen-h2o VERB ...`: hands the rest of the line to the verb's module, imported only then."""

from __future__ import annotations

import difflib
import importlib
import signal
import sys

import flexgen_h2o
from flexgen_h2o.cli_common import called_as
from flexgen_h2o.core.errors import EXIT_DONE, EXIT_USAGE, SIGNAL_BASE
from flexgen_h2o.core.units import aligned

# verb -> (module with `main(argv) -> int`, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "flex-opt": ("flexgen_h2o.flex_opt", "generate text for prompts, or run the fixed-length benchmark"),
    "complete": ("flexgen_h2o.complete", "complete one's own prompts"),
    "chat": ("flexgen_h2o.chat", "talk to a model, its KV cache kept from turn to turn"),
    "plan": ("flexgen_h2o.policy_search", "find the fastest policy and say what it costs, before a run"),
    "hardware": ("flexgen_h2o.hardware", "measure this machine's hardware profile"),
    "doctor": ("flexgen_h2o.doctor", "say what of this machine and installation would hurt a run"),
    "batch": ("flexgen_h2o.batch", "run a JSONL file of requests durably: it may be killed, and goes on"),
    "run-batch": ("flexgen_h2o.batch", "the same, as vLLM calls it"),
    "serve": ("flexgen_h2o.serve", "answer OpenAI's clients, and run their batches, in one block"),
    "cache": ("flexgen_h2o.cache", "list and remove the weights and files that are kept for later runs"),
    "evaluate": ("flexgen_h2o.evaluate", "measure what eviction costs: fidelity, own prompts, streams"),
}


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
        print(f"flexgen-h2o: unknown verb {verb!r}; {_nearest(verb)}known: {', '.join(VERBS)}", file=sys.stderr)
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
    """The verb that somebody may mean, by its name or its module's."""
    by_name = {module.rpartition(".")[2]: verb for verb, (module, _) in reversed(VERBS.items())} | {v: v for v in VERBS}
    near = difflib.get_close_matches(word.replace("-", "_"), by_name, n=1)
    return f"did you mean {by_name[near[0]]}? " if near else ""


def _usage() -> str:
    verbs = "\n".join(f"  {line}" for line in aligned([(verb, text) for verb, (_, text) in VERBS.items()]))
    return f"usage: flexgen-h2o VERB ... | --help | --version\n\n{verbs}\n\nflexgen-h2o VERB --help lists its flags."


if __name__ == "__main__":
    sys.exit(main())
