"""JSON Schemas of the control messages: `python -m moebus.schemas.export docs/schemas`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from moebus.schemas.control import ControlRequest
from moebus.schemas.control_args import ARGS
from moebus.schemas.members import MemberOps, MemberState
from moebus.schemas.responses import ControlResponse

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REF = "#/$defs/{model}"


def control_schemas() -> dict[str, str]:
    """File name -> text of every schema, as checked in under `docs/schemas`."""
    schemas = {
        "control-request.v1.json": _request_schema(),
        "control-response.v1.json": ControlResponse.model_json_schema(ref_template=_REF),
        "member-state.v1.json": MemberState.model_json_schema(ref_template=_REF),
        "member-ops.v1.json": MemberOps.model_json_schema(ref_template=_REF),
    }
    return {name: json.dumps({"$schema": _DIALECT, **schema}, indent=2) + "\n" for name, schema in schemas.items()}


def _request_schema() -> dict[str, Any]:
    """The request with the arguments of each method: `if method is m then args is the model of m`."""
    schema = ControlRequest.model_json_schema(ref_template=_REF)
    definitions: dict[str, Any] = schema.setdefault("$defs", {})
    rules: list[dict[str, Any]] = []
    for method, model in ARGS.items():
        body = model.model_json_schema(ref_template=_REF)
        definitions.update(body.pop("$defs", {}))
        definitions[model.__name__] = body
        args = {"anyOf": [{"$ref": f"#/$defs/{model.__name__}"}, {"type": "null"}]}
        required = ["args"] if body.get("required") else []
        then: dict[str, Any] = {"properties": {"args": args}} | ({"required": required} if required else {})
        rules.append({"if": {"properties": {"method": {"const": str(method)}}}, "then": then})
    return schema | {"allOf": rules}


def main(arguments: list[str]) -> int:
    """Writes the schemas into the folder named. Returns the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("use: python -m moebus.schemas.export FOLDER\n")
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in control_schemas().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
