"""Pools of an inventory, as far as an image must fit them: the GPUs of their machines.

A pool is a group that sets ``pool_image``, the image that its machines run, and ``pool_vm_size``, what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from image_builder.definition import engine
from image_builder.definition.evaluate import resolved_variables
from image_builder.definition.values import JSON
from image_builder.errors import Problem

if TYPE_CHECKING:
    from image_builder.definition.engine import Source
    from image_builder.definition.model import ImageDefinition

IMAGE, SIZE = "pool_image", "pool_vm_size"
# The variable that tells what sizes an image's GPU driver was chosen for.
SIZES = "nvidia_vm_sizes"
_LAYER = "gpu"


def pool_problems(definition: ImageDefinition, source: Source) -> list[Problem]:
    """Return the pools that run an image with a GPU driver which wasn't chosen for their size.

    Groups are looked at, not their machines: there may be thousands.
    """
    pools = [
        found for found in source.own_variables() if found.get(IMAGE) == definition.name and SIZE in found
    ]
    if not pools or _LAYER not in definition.layers:
        return []
    sizes = resolved_variables(definition).get(SIZES)
    problems = []
    for pool in pools:
        size = _evaluated(pool)
        if size and not fits(size, sizes):
            key = next(key for key in pool if key == SIZE)
            where = engine.place_of(key) or engine.place_of(pool[SIZE]) or ""
            what = f"{size} runs `{definition.name}`, whose {SIZES} don't have it"
            problems.append(Problem(str(where), SIZE, what))
    return problems


def _evaluated(pool: Mapping[str, object]) -> str:
    """Return the size, or nothing for a template of variables that the group doesn't set itself."""
    plain = {str(key): engine.plain(value) for key, value in pool.items()}
    try:
        return str(engine.Evaluator(plain).evaluate(plain[SIZE]))
    except engine.EvaluationError:
        return ""


def fits(size: str, sizes: JSON) -> bool:
    """Tell whether a size is among others, as the role compares them."""
    return isinstance(sizes, Iterable) and _bare(size) in {_bare(str(other)) for other in sizes}


def _bare(size: str) -> str:
    return size.lower().removeprefix("standard_")
