"""The command line: ``lightning-parallel consolidate SRC DST``."""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Sequence

from lightning_parallel.checkpoint.consolidate import consolidate
from lightning_parallel.errors import ParallelConfigError

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 2 with a message on stderr where the input is wrong."""
    parser = argparse.ArgumentParser(prog="lightning-parallel", description="Tools for parallel training.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    verb = verbs.add_parser(
        "consolidate",
        help="make one Lightning checkpoint file of a folder of shards",
        description="Make one Lightning checkpoint file of a folder of shards. One process; no devices needed.",
    )
    verb.add_argument("source", metavar="SRC", help="the folder that was saved with save_distributed_checkpoint=True")
    verb.add_argument("target", metavar="DST", help="the file to write")
    verb.add_argument("--overwrite", action="store_true", help="replace DST if it is there")
    verb.add_argument(
        "--no-weights-only",
        action="store_true",
        help="also unpickle objects other than tensors and plain data; only for checkpoints you trust",
    )
    arguments = parser.parse_args(argv)
    try:
        consolidate(
            arguments.source,
            arguments.target,
            weights_only=False if arguments.no_weights_only else None,
            overwrite=arguments.overwrite,
        )
    except ParallelConfigError as error:
        return _complain(str(error))
    except pickle.UnpicklingError as error:
        return _complain(f"{error}\nIf you trust {arguments.source}, add --no-weights-only.")
    except (OSError, ValueError, RuntimeError) as error:
        return _complain(f"{type(error).__name__}: {error}")
    return 0


def _complain(message: str) -> int:
    print(f"lightning-parallel: error: {message}", file=sys.stderr)
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
