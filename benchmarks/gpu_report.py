"""The report of benchmarks/gpu.py: what ran, what failed, and times compared with peers."""

from collections.abc import Iterable
from pathlib import Path

from gpu_calls import TOLERANCES
from gpu_session import Row, Session

from onescan.checkpoint.files import write_atomically

REPORT = "report.md"
DTYPES = [str(dtype).removeprefix("torch.") for dtype in TOLERANCES]
CHECKED = ("check", "edges", "tests", "memcheck")
TIMED = {"ops": "Ops", "models": "Training steps", "fla": "flash-linear-attention"}


def problems(session: Session) -> list[str]:
    """Return what failed: checks, tests, candidates that could not run, and stages."""
    failures = []
    for stage in CHECKED:
        for row in session.rows(stage):
            if not row["ok"]:
                failures.append(f"{stage}: {_failed(row)}")
    for stage in (*TIMED, "decode", "compile"):
        for row in session.rows(stage):
            if "error" in row:
                failures.append(f"{stage}: {row['name']}: {row['error']}")
    for row in session.rows("stages"):
        if row["ended"]:
            failures.append(f"stage {row['name']}: {row['ended']}")
    return failures


def _failed(row: Row) -> str:
    if "op" in row:
        if "error" in row:
            reason = row["error"]
        elif not row["repeats"]:
            reason = "two equal calls differ"
        else:
            reason = f"error {max(row['errors']):.2g}, {row['torch_error']:.2g} in torch"
        return f"{row['op']}, {row['call'] or 'plain'}, {row['dtype']}: {reason}"
    name = row.get("name") or row.get("summary") or f"{row.get('invalid')} invalid addresses"
    return f"{name}: {row['problem']}" if row.get("problem") else str(name)


def write_report(session: Session) -> Path:
    """Write the report and return its path."""
    parts = ["# onescan on a GPU", _environment(session), _problems(session), _checks(session)]
    parts += [_edges(session), _tests(session)]
    parts += [_times(session, stage, title) for stage, title in TIMED.items()]
    parts += [_decoding(session), _stages(session)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    path = session.out / REPORT
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    return path


def _environment(session: Session) -> str:
    rows = session.rows("environment")
    facts = [f"- {name.replace('_', ' ')}: {value}" for row in rows for name, value in row.items()
             if name != "stage"]  # fmt: skip
    if session.dry:
        facts.insert(0, "This is a dry run on a CPU. Its numbers mean nothing.\n")
    return "\n".join(facts)


def _problems(session: Session) -> str:
    failures = problems(session)
    lines = [f"- {failure}" for failure in failures] or ["Everything that ran passed."]
    return "\n".join(
        [f"## {len(failures) or 'No'} failure{'s' * (len(failures) != 1)}", "", *lines]
    )


def _checks(session: Session) -> str:
    """Return a table of the errors of each call, with those of plain torch in parentheses."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in session.rows("check"):
        text = "failed"
        if "errors" in row:
            text = f"{max(row['errors']):.1e} ({row['torch_error']:.1e})"
        mark = "" if row["ok"] else " **failed**"
        cells.setdefault((row["op"], row["call"]), {})[row["dtype"]] = (
            text.removesuffix("failed") + mark
        )
    if not cells:
        return ""
    limits = ", ".join(
        f"{name} {limit:.0e}" for name, limit in zip(DTYPES, TOLERANCES.values(), strict=True)
    )
    caption = (
        "Largest error of outputs and gradients as a fraction of the largest value; in "
        f"parentheses, that of plain torch on the same device. Tolerances: {limits}."
    )
    rows = [
        [op, call or "plain", *(by_dtype.get(name, "") for name in DTYPES)]
        for (op, call), by_dtype in cells.items()
    ]
    return f"## Errors\n\n{caption}\n\n{_table(['op', 'call', *DTYPES], rows)}"


def _edges(session: Session) -> str:
    rows = [[row["name"], row["problem"] or "passed"] for row in session.rows("edges")]
    rows += [["invalid addresses", str(row["invalid"])] for row in session.rows("memcheck")]
    return f"## Edge cases\n\n{_table(['case', 'result'], rows)}" if rows else ""


def _tests(session: Session) -> str:
    lines = [row["summary"].strip("= ") for row in session.rows("tests") if "summary" in row]
    return "## Tests\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def _times(session: Session, stage: str, title: str) -> str:
    """Return a table of times, and their ratio to that of the peer at the same size and mode."""
    rows = session.rows(stage)
    peers = {(row["name"], row["mode"], row["size"]): row.get("ms")
             for timed_stage in TIMED for row in session.rows(timed_stage)}  # fmt: skip
    copies = [row.get("copy_gb_s") for row in session.rows("environment")]
    copy = copies[0] if copies else None
    cells = []
    for row in rows:
        if "ms" not in row:
            continue
        peer = peers.get((row["peer"], row["mode"], row["size"]))
        relative = (
            f"{row['ms'] / peer:.2f} x {row['peer']}" if peer and row["peer"] != row["name"] else ""
        )
        bandwidth = f"{row['gb_s'] / copy:.0%}" if copy and "gb_s" in row else ""
        cells.append([row["name"], row["mode"], row["size"], f"{row['ms']:.3g}",
                      f"{row['eager_ms']:.3g}" if "eager_ms" in row else "", relative, bandwidth,
                      str(row.get("peak_mib", ""))])  # fmt: skip
    if not cells:
        return ""
    header = [
        "name",
        "pass",
        "size",
        "ms",
        "ms, eager",
        "time relative to peer",
        "share of the copy bandwidth",
        "peak MiB",
    ]
    caption = (
        "Median milliseconds of a call in a CUDA graph, and of a call that the host launches "
        '("eager"). The bandwidth counts inputs, outputs and gradients once.'
    )
    return f"## {title}\n\n{caption}\n\n{_table(header, cells)}"


def _decoding(session: Session) -> str:
    rows = [
        [row["name"], str(row["batch"]), "yes" if row["cuda_graph"] else "no", f"{row['ms']:.3g}",
         f"{row['tokens_s']:,}", "yes" if row["same_text"] else "no"]
        for row in session.rows("decode") if "ms" in row
    ]  # fmt: skip
    header = ["model", "batch", "CUDA graph", "ms per token", "tokens/s", "same text"]
    return f"## Decoding\n\n{_table(header, rows)}" if rows else ""


def _stages(session: Session) -> str:
    rows = [
        [row["name"], f"{row['seconds']:.0f}", row["ended"] or "completed"]
        for row in session.rows("stages")
    ]
    return f"## Stages\n\n{_table(['stage', 'seconds', 'result'], rows)}"


def _table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
