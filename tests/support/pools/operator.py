"""The command line in a separate process, as an operator has it: ``python -m tests.support.pools.operator SUITE …``.

It is the product's except for two things: the suite is SUITE, since the tests' hosts haven't booted, and a roll
waits for seconds where a real one waits for half a minute.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from unittest import mock

from image_builder.cli.main import main
from image_builder.pool import rollout
from image_builder.pool.scale_set.roll import Patience
from image_builder.pool.steps.fleet import Change
from image_builder.pool.steps.suite import Suite

# Two looks `settle` apart identify an untouched instance; a host that returns is back within `boot`.
PATIENCE = Patience(look=0.5, settle=2.0, request=60.0, boot=25.0)


def operate(suite: Path) -> None:
    """Run the command line with the remaining arguments."""
    with (
        mock.patch.object(rollout, "Suite", partial(Suite, folder=suite)),
        mock.patch.object(rollout, "Change", partial(Change, patience=PATIENCE, settle_seconds=1.0)),
    ):
        main()


if __name__ == "__main__":
    operate(Path(sys.argv.pop(1)))
