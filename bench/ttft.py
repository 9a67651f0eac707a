"""Time to the first token: dense, sparse, and transformers on the same weights, interleaved.

`python -m bench.ttft [--json] [--rounds N]`. Real text through the three real services; sparse is
forced, keeps 20 % and includes scoring. Every request starts at another place of the text, so no
cache could help. The peer is transformers' own dense prefill (sdpa, fp32, logits of the last token,
as many threads as each service has) in this process, while the services are idle. Ratios are of
medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import tokenizers
import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.report import ROOT, environment, print_last_line
from client import Client, Delta, Finished
from demo.launcher import LaunchPlan, LocalServices, exit_on_sigterm
from demo.models import default_plan

SIZES = (1024, 2048, 4096)
KEEP_BASIS_POINTS = 2000
ROUNDS_MIN = 5
THREADS = 2
# Two prompts of one run start this many tokens apart, or more.
STRIDE_TOKENS = 61
TEXTS = ("docs/ARCHITECTURE.md", "README.md", "docs/STYLE.md", "docs/GLOSSARY.md")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass
class Samples:
    """Seconds of every round for one prompt length, and what the sparse turns reported."""

    size: int
    dense_s: list[float] = field(default_factory=list)
    sparse_s: list[float] = field(default_factory=list)
    peer_s: list[float] = field(default_factory=list)
    client_dense_s: list[float] = field(default_factory=list)
    client_sparse_s: list[float] = field(default_factory=list)
    sparse: list[Finished] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Medians. sparse_s is None if any of the turns did not go sparse."""
        last = self.sparse[-1]
        went_sparse = all(f.decision.path == "SPARSE" for f in self.sparse)
        dense_s, peer_s = statistics.median(self.dense_s), statistics.median(self.peer_s)
        sparse_s = statistics.median(self.sparse_s) if went_sparse else None
        odd = next((f for f in self.sparse if f.decision.path != "SPARSE"), last)
        return {
            "prompt_tokens": last.counts.prompt_tokens,
            "dense_s": round(dense_s, 4),
            "sparse_s": None if sparse_s is None else round(sparse_s, 4),
            "peer_hf_dense_s": round(peer_s, 4),
            "speedup": None if sparse_s is None else round(dense_s / sparse_s, 3),
            "dense_vs_peer": round(peer_s / dense_s, 3),
            "path": odd.decision.path,
            "reason": odd.decision.reason,
            "kept_tokens": last.plan.kept_tokens if last.plan else None,
            "ranked_chunks": last.plan.ranked_chunks if last.plan else None,
            "query_mode": last.settings.plan.query_mode,
            "client_dense_s": round(statistics.median(self.client_dense_s), 4),
            "client_sparse_s": round(statistics.median(self.client_sparse_s), 4),
            "stages_s": {k: round(v, 4) for k, v in last.timings.stages().items() if v > 0},
        }


@app.command()
def run(
    rounds: Annotated[int, typer.Option(min=ROUNDS_MIN, help="Interleaved rounds.")] = ROUNDS_MIN,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON line on stdout.")] = False,
) -> None:
    """Measure and print a table, then one JSON line."""
    console = Console(stderr=as_json)
    torch.set_num_threads(THREADS)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="specprefill-bench-") as logs:
        plan = _with_threads(default_plan(Path(logs), console))
        tokenizer = tokenizers.Tokenizer.from_file(str(plan.target_dir / "tokenizer.json"))
        ids = tokenizer.encode(_corpus(), add_special_tokens=False).ids
        peer = _load_peer(plan.target_dir)
        with LocalServices(plan) as services, Client(services.address) as client:
            bench = _Bench(client, peer, tokenizer, ids)
            bench.warm_up()
            samples = bench.measure(rounds, console)
            info = client.server_info()
    rows = [sample.row() for sample in samples]
    console.print(_table(rows))
    draft_layers = info.draft.layers_used if info.draft else None
    result = {
        "bench": "ttft",
        **{
            key: rows[-1][key]
            for key in ("dense_s", "sparse_s", "peer_hf_dense_s", "speedup", "dense_vs_peer")
        },
        "rows": rows,
        "rounds": rounds,
        "keep_basis_points": KEEP_BASIS_POINTS,
        "draft_layers": draft_layers,
        "duration_s": round(time.perf_counter() - started, 1),
        **environment(threads=THREADS),
    }
    print_last_line(result)


class _Bench:
    """One prompt of every size and round, through whichever side's turn it is."""

    def __init__(
        self, client: Client, peer: Any, tokenizer: tokenizers.Tokenizer, ids: list[int]
    ) -> None:
        self._client = client
        self._peer = peer
        self._tokenizer = tokenizer
        self._ids = ids
        self._asked = 0

    def warm_up(self) -> None:
        """Let every side touch its memory once."""
        for measure in (self._dense, self._sparse, self._hf):
            measure(Samples(SIZES[0]))

    def measure(self, rounds: int, console: Console) -> list[Samples]:
        samples = [Samples(size) for size in SIZES]
        sides: list[Callable[[Samples], None]] = [self._dense, self._sparse, self._hf]
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("measuring", total=rounds * len(SIZES) * len(sides))
            for number in range(rounds):
                # Each side goes first in turn: a machine that slows down hits all alike.
                order = sides[number % 3 :] + sides[: number % 3]
                for sample in samples:
                    for measure in order:
                        measure(sample)
                        progress.advance(task)
        return samples

    def _dense(self, samples: Samples) -> None:
        client_s, finished = self._turn(samples.size, "dense")
        assert finished.decision.path == "DENSE"
        samples.dense_s.append(finished.timings.time_to_first_token_s)
        samples.client_dense_s.append(client_s)

    def _sparse(self, samples: Samples) -> None:
        client_s, finished = self._turn(samples.size, "sparse")
        samples.sparse_s.append(finished.timings.time_to_first_token_s)
        samples.client_sparse_s.append(client_s)
        samples.sparse.append(finished)

    def _turn(self, size: int, mode: str) -> tuple[float, Finished]:
        """Seconds until the client has the first token, and the turn's last message."""
        prompt = self._prompt(size)
        started = time.perf_counter()
        first_s: float | None = None
        for event in self._client.generate(
            self._tokenizer.decode(prompt, skip_special_tokens=False),
            mode=mode,
            keep_basis_points=KEEP_BASIS_POINTS,
            max_tokens=2,
            ignore_end_tokens=True,
        ):
            if first_s is None and isinstance(event, Delta):
                first_s = time.perf_counter() - started
            if isinstance(event, Finished):
                return first_s or time.perf_counter() - started, event
        raise AssertionError("a turn without a finished message")

    def _hf(self, samples: Samples) -> None:
        ids = torch.tensor([self._prompt(samples.size)])
        started = time.perf_counter()
        with torch.inference_mode():
            logits = self._peer(ids, use_cache=True, logits_to_keep=1).logits
            int(logits[0, -1].argmax())
        samples.peer_s.append(time.perf_counter() - started)

    def _prompt(self, size: int) -> list[int]:
        """Ids of `size` tokens of real text that starts like no other prompt of this run."""
        self._asked += 1
        start = self._asked * STRIDE_TOKENS % len(self._ids)
        return (self._ids[start:] + self._ids[:start])[:size]


def _with_threads(plan: LaunchPlan) -> LaunchPlan:
    threads = {"TORCH_THREADS": str(THREADS)}
    return replace(
        plan,
        scorer_env={**plan.scorer_env, **threads},
        target_env={**plan.target_env, **threads},
    )


def _corpus() -> str:
    """The demo's handbook and this project's own documents."""
    handbook = resources.files("demo").joinpath("handbook.txt").read_text(encoding="utf-8")
    texts = [handbook, *((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)]
    return "\n\n".join(texts)


def _load_peer(model_dir: Path) -> Any:
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


def _table(rows: list[dict[str, Any]]) -> Table:
    queries = rows[-1]["query_mode"].lower()
    table = Table(
        title="seconds to the first token, medians; x: times as fast as",
        title_justify="left",
        caption=f"sparse keeps 20 %, queries: {queries}; peer: transformers, dense, same weights",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    headings = ("prompt", "dense", "sparse", "peer", "sparse", "dense", "kept", "ranked")
    units = ("tokens", "s", "s", "s", "x dense", "x peer", "tokens", "chunks")
    for heading, unit in zip(headings, units, strict=True):
        table.add_column(f"{heading}\n{unit}", justify="right")
    for row in rows:
        went_sparse = row["sparse_s"] is not None
        table.add_row(
            str(row["prompt_tokens"]),
            f"{row['dense_s']:.2f}",
            f"{row['sparse_s']:.2f}" if went_sparse else f"{row['path']}: {row['reason']}",
            f"{row['peer_hf_dense_s']:.2f}",
            f"{row['speedup']:.2f}" if went_sparse else "-",
            f"{row['dense_vs_peer']:.2f}",
            "-" if row["kept_tokens"] is None else str(row["kept_tokens"]),
            "-" if row["ranked_chunks"] is None else str(row["ranked_chunks"]),
        )
    return table


if __name__ == "__main__":
    exit_on_sigterm()
    app()
