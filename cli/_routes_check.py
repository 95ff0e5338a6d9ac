"""`moebus routes verify` and `export`: everything below a prefix, checked or written to files."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import numpy as np
import typer
import xxhash

from moebus.cli._output import JsonFlag, emit, out
from moebus.cli._routes import Prefix, Run, open_reader, size_text
from moebus.consumers.reader import RouteBatch
from moebus.consumers.reader.verify import PATIENCE, listed_all, verify
from moebus.producers.model_file import read_card
from moebus.schemas.errors import InvalidInput
from moebus.schemas.rollout import check_prefix
from moebus.schemas.route_ref import RouteRef

INDEX = "index.jsonl"
_LONGEST_NAME = 150
Model = Annotated[
    Path | None, typer.Option(help="`config.json` of the model (or its folder): what every rollout has to fit.")
]


class Layout(str, Enum):
    """Choices of `--layout`."""

    npy = "npy"
    fastdeploy = "fastdeploy"
    sglang = "sglang"
    slime = "slime"
    miles = "miles"
    verl = "verl"


def verify_command(
    ctx: typer.Context,
    prefix: Prefix = None,
    run: Run = None,
    model: Model = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Look at so many rollouts only.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Read every rollout of a run from the stores and check it: checksums, shape, expert ids, rows, model card.

    Prints what is wrong and a summary; exit code 1 if anything is. With `--json` one object for each bad rollout,
    then the summary.

    Example: `moebus routes verify gsm8k-17 --run exp-7 --model config.json`
    """
    if prefix is not None:
        check_prefix(prefix)
    card = read_card(model, "--model") if model else None
    checked = bad = size = 0
    with open_reader(ctx, run, card) as reader:
        for one in verify(reader, prefix, limit):
            checked, size = checked + 1, size + one.nbytes
            if one.fault is not None:
                bad += 1
                emit({**one.listed.as_dict(), "fault": one.fault}, as_json=as_json, text=one.fault)
    summary = {"checked": checked, "bad": bad, "bytes": size}
    emit(
        summary,
        as_json=as_json,
        text=f"run {reader.run}: {checked} rollouts checked, {bad} bad, {size_text(size)} read",
    )
    if bad:
        raise typer.Exit(1)


def export_command(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Option("--out", help="Folder to write to; made if it is not there.")],
    prefix: Prefix = None,
    run: Run = None,
    layout: Annotated[Layout, typer.Option(help="npy: [rows, layers, top_k] as stored.")] = Layout.npy,
    model_len: Annotated[int | None, typer.Option(min=1, help="fastdeploy: rows to pad to (max_model_len).")] = None,
    shared_experts: Annotated[int, typer.Option(min=0, help="fastdeploy: shared experts of the model.")] = 0,
    hidden_layers: Annotated[
        int | None, typer.Option(min=1, help="sglang (needed), slime, verl: all layers, by global number.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Write so many rollouts only.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the rollouts below a prefix to files, in the layout that a trainer knows.

    npy: as stored. fastdeploy: [layers, model_len, top_k], all ones where there is no row. sglang: base64 of int32 in a
    text file. slime, miles: int32 [rows, layers, top_k]. verl: int16 [rows + 1, layers, top_k]. `index.jsonl` in the
    folder says which file is which rollout; a folder that has one already is refused.

    Example: `moebus routes export gsm8k-17 --run exp-7 --layout verl --out /tmp/routes`
    """
    if prefix is not None:
        check_prefix(prefix)
    convert = _converter(layout, model_len, shared_experts, hidden_layers)
    if (folder / INDEX).exists():
        raise InvalidInput("--out", f"{folder} holds an export already; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput("--out", f"{folder} cannot be made: {error.strerror}") from None
    count = 0
    with open_reader(ctx, run) as reader, (folder / INDEX).open("w", encoding="utf-8") as index:
        for listed in listed_all(reader, prefix, limit):
            if listed.ref.rows == 0:
                continue  # nothing was forwarded: there is no array
            path = folder / _file_name(listed.ref, "txt" if layout is Layout.sglang else "npy")
            _write(path, convert(reader.resolve([listed.ref], wait=PATIENCE)))
            index.write(json.dumps({"file": path.name, **listed.as_dict()}, ensure_ascii=False) + "\n")
            count += 1
    emit(
        {"folder": str(folder), "layout": layout.value, "rollouts": count},
        as_json=as_json,
        text=f"{count} rollouts in {folder}, listed in {INDEX}",
    )
    if not as_json and not count:
        out.print("nothing is below this prefix: see `moebus routes ls`")


def _converter(
    layout: Layout, model_len: int | None, shared: int, hidden: int | None
) -> Callable[[RouteBatch], np.ndarray | str]:
    if layout is Layout.fastdeploy:
        if model_len is None:
            raise InvalidInput("--model-len", "needed for the layout fastdeploy")
        return lambda batch: batch.export.fastdeploy(model_len, shared)[0]
    if layout is Layout.sglang:
        if hidden is None:
            raise InvalidInput("--hidden-layers", "needed for the layout sglang")
        return lambda batch: batch.export.sglang(hidden)[0]
    if layout in (Layout.slime, Layout.miles):
        return lambda batch: batch.export.slime(hidden)[0]
    if layout is Layout.verl:
        return lambda batch: batch.export.verl(hidden)[0]
    return lambda batch: batch.routes


def _file_name(ref: RouteRef, kind: str) -> str:
    """Unique, and legal on every file system; long ids are cut and get a hash."""
    text = quote(ref.rollout_id, safe="")
    if len(text) > _LONGEST_NAME:
        text = f"{text[: _LONGEST_NAME - 33]}-{xxhash.xxh3_128_hexdigest(ref.rollout_id.encode())}"
    return f"{text}.{ref.choice}.{ref.attempt}.{kind}"


def _write(path: Path, content: np.ndarray | str) -> None:
    if isinstance(content, str):
        path.write_text(content, encoding="ascii")
        return
    with path.open("wb") as file:
        np.save(file, content, allow_pickle=False)
