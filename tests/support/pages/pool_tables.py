"""The tables in docs/reference/pools.md, docs/how-to/drain.md and bad-nodes.md that are generated from the code.

Policies, a journal's records, a scale set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from image_builder.cluster.gate import policy as gate
from image_builder.drain.policy import Policy as DrainPolicy
from image_builder.drain.policy import Rule
from image_builder.pool.plan.policy import Policy, Roll
from image_builder.pool.plan.template import PoolAzure
from image_builder.pool.run.records import Record

_POLICY = ("<!-- policy: begin -->", "<!-- policy: end -->")
_SCALE_SET = ("<!-- pool_azure: begin -->", "<!-- pool_azure: end -->")
_RULE = ("<!-- rule: begin -->", "<!-- rule: end -->")
_RECORDS = ("<!-- records: begin -->", "<!-- records: end -->")


def with_tables(text: str) -> str:
    """Return the page with its tables updated from the code."""
    for marks, table in (
        (_POLICY, model_table(Policy)),
        (_SCALE_SET, model_table(PoolAzure)),
        (_RECORDS, records_table()),
    ):
        text = _between(text, marks, table)
    return text


def with_drain_tables(text: str) -> str:
    """Return the page about drains with its tables updated from the code."""
    return _between(_between(text, _POLICY, model_table(DrainPolicy)), _RULE, model_table(Rule))


def with_health_tables(text: str) -> str:
    """Return the page about bad nodes with its tables updated from the code."""
    rows = model_table(gate.Policy).splitlines()
    # The gate refuses the first two; the others pace a loop that only drains have.
    absent = ("whole_gangs", "max_fenced", "poll_seconds", "looks_per_second")
    policy = "\n".join(row for row in rows if not row.startswith(tuple(f"| `drain.{key}`" for key in absent)))
    return _between(_between(text, _POLICY, policy), _RULE, model_table(gate.Rule))


def _between(text: str, marks: tuple[str, str], table: str) -> str:
    before, _, rest = text.partition(marks[0])
    _, _, after = rest.partition(marks[1])
    return f"{before}{marks[0]}\n{table}\n{marks[1]}{after}"


def model_table(model: type[BaseModel]) -> str:
    rows = [f"| `{name}` | {default} | {what} |" for name, default, what in _fields(model)]
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])


def _fields(
    model: type[BaseModel], above: str = "", defaults: BaseModel | None = None
) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        if model is Policy and name == "roll":
            yield from _fields(Roll, "roll.")
        elif isinstance(field.default, BaseModel):
            yield from _fields(type(field.default), f"{above}{name}.", field.default)
        else:
            value = getattr(defaults, name) if defaults else field.get_default(call_default_factory=True)
            default = "required" if field.is_required() else f"`{_json(value)}`"
            yield f"{above}{name}", default, str(field.description)


def _json(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def records_table() -> str:
    rows = []
    for model in get_args(get_args(Record)[0]):
        fields = [f"`{name}`" for name in model.model_fields if name not in ("kind", "at")]
        what = (
            " ".join((model.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
            if "__doc__" in vars(model)
            else ""
        )
        rows.append(f"| `{model.model_fields['kind'].default}` | {', '.join(fields)} | {what} |")
    return "\n".join(["| `kind` | fields | meaning |", "| --- | --- | --- |", *rows])
