"""Verify the sealed tree, while the disk is made from it.

Product: ``facts.json`` (the facts that drive the suite), ``junit.xml``, ``verify.json``, and the verdict that
publishing reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from image_builder.bake.stages import StageContext
from image_builder.bake.verification import Verdict
from image_builder.canonical import JSON
from image_builder.system.sandbox import open_root
from image_builder.verify.result import require_passed
from image_builder.verify.runner import definition_facts, observe_suite, require_red, write_facts

_TIMEOUT = 600.0
# The checks run alongside the disk and convert stages, which take longer and get the processors first.
_NICENESS = 10


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Verify the sealed tree. Raises VerifyError unless every check ran and passed."""
    with open_root(ctx.lowers, ctx.work) as root:
        path = ctx.product / "facts.json"
        options = ctx.plan.options
        facts = definition_facts(ctx.definition, options["build_id"], options["packages"], options["preload"])
        write_facts(path, facts)
        result = observe_suite(
            f"sandbox:{root.path}",
            path,
            ctx.product,
            marker="offline",
            python=ctx.settings.python,
            log=ctx.log,
            timeout=_TIMEOUT,
            niceness=_NICENESS,
            checks=ctx.definition.checks,
            on_progress=lambda _name, done, total: ctx.monitor.stage_progress(
                ctx.plan.name, done, total, "checks"
            ),
        )
    require_passed(result)
    if ctx.definition.checks and result.own:
        _prove(ctx, ctx.definition.checks)
    verdict = Verdict(
        marker=result.marker,
        checks=len(result.checks),
        passed=len(result.passed),
        not_applicable=len(result.not_applicable),
        seconds=round(result.seconds, 3),
    )
    verdict.write(ctx.product)
    return {"checks": verdict.checks, "not_applicable": verdict.not_applicable}


def _prove(ctx: StageContext, checks: Path) -> None:
    """Break the image in each way recorded for the user's own checks. Raises VerifyError if one stays green."""
    ctx.doing("showing that the checks of your own can fail")
    work = ctx.work / "mutants"
    work.mkdir()
    lowers = ":".join(map(os.fspath, ctx.lowers))
    require_red(
        f"mutant:{lowers}?work={work}",
        ctx.product / "facts.json",
        work,
        checks,
        marker="offline",
        python=ctx.settings.python,
        log=ctx.log,
        timeout=_TIMEOUT,
        niceness=_NICENESS,
    )
