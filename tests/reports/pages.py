"""Readers of reports, and folders of runs as ``infer`` leaves them."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from penstock.reports.content import Report, json_page
from penstock.reports.page import html_page

HOSTILE = (
    "<script>alert(1)</script><img src=http://e.vil/x onerror=y>\" ' a|b\x1b[2J\x00\u202e"
    "![p](http://e.vil) =HYPERLINK(1) $\\frac{ $$x$$ \\(x\\) @x{y} {{7*7}}"
    " url(http://e.vil) </style></svg>"
)


class Page(HTMLParser):
    """An HTML page, parsed: its elements, its texts, and all that a browser may ask for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.styles: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self._inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._inside.pop()

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._inside[-1:] or [""]
        if inside[0] != "script":  # the texts of figures are data, and no script asks for them
            (self.styles if inside[0] == "style" else self.texts).append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))

    def asked(self) -> list[str]:
        """All that the page would fetch, or go to: no fragment of itself and no data of its own."""
        links = ("src", "href", "xlink:href", "action", "poster", "srcset", "data", "background")
        urls = [a[name] for _, a in self.elements for name in links if name in a]
        styles = [*self.styles, *(a["style"] for _, a in self.elements if "style" in a)]
        urls += [each for style in styles for each in re.findall(r"url\(([^)]*)\)", style)]
        urls += [a for style in self.styles for a in re.findall(r"@import[^;]*", style)]
        drawn = ("fill", "stroke", "clip-path", "mask", "filter", "marker-start", "marker-end")
        styles = [a[name] for _, a in self.elements for name in drawn if name in a]
        urls += [each for style in styles for each in re.findall(r"url\(([^)]*)\)", style)]
        return [each for each in urls if each and not each.strip("\"'").startswith(("#", "data:"))]


def page_of(report: Report) -> Page:
    return Page(html_page(report))


def text_of(report: Report) -> str:
    """All that a report says, without drawing it."""
    return json.dumps(json.loads(json_page(report)), ensure_ascii=False)


def run_folder(
    folder: Path,
    stages: dict[str, tuple[float, float, int]] | None = None,
    seconds: float = 10.0,
    **changes: Any,
) -> Path:
    """The folder of a run of infer.

    ``stages`` are busy and waited seconds and threads of each; without any the run is not done.
    ``changes`` are those of summary.json, and ``run`` those of run.json.
    """
    folder.mkdir(parents=True)
    run = {
        "run": "1", "blocks": 4, "settings": {"model_type": "identity", "patch": [64]},
        "fingerprint": {
            "domain": [[0, 0, 0, 0, 0], [1, 1, 96, 240, 240]], "patch": [64, 64, 64],
            "overlap": [16, 16, 16], "seam": ["trim", 0.05], "devices": ["cpu"],
            "model": ["identity", "", 1],
        },
        "maker": {"torch": "2.13.0", "gpus": []},
        "plan": {
            "cores": 4, "patch_amplification": 1.8, "read_amplification": 1.25,
            "memory": {"base": 300 * 2**20, "blocks": 100 * 2**20},
        },
        **changes.pop("run", {}),
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    done = 0 if stages is None else 4
    (folder / "done.log").write_text("".join(f"0 0 0 {x}\n" for x in range(done)))
    header = {"schema": 1, "queues": {"prep": 6, "stitch": 6}, "interval": 1.0, "cpu_count": 4}
    rows = [
        {
            "t": float(t), "time": 1e9 + t, "cpu_percent": 100.0 + t, "rss_bytes": (200 + t) << 20,
            "pss_bytes": None, "gpus": [], "gauges": {"prep": t % 3, "stitch": 1, "retries": 0},
            **{f"{w}_bytes_per_s": 1.0 for w in ("read", "write", "machine_read", "machine_write",
                                                 "net_sent", "net_recv")},
        }
        for t in range(20)
    ]  # fmt: skip
    lines = "\n".join(json.dumps(line) for line in (header, *rows))
    (folder / "metrics.jsonl").write_text(lines + "\n")
    if stages is not None:
        totals = {
            name: {"busy": busy, "waited": waits, "count": 10, "threads": threads}
            for name, (busy, waits, threads) in stages.items()
        }
        summary = {
            "seconds": seconds, "voxels": 5_529_600, "input_bytes": 11_059_200, "blocks_written": 4,
            "blocks_skipped": 0, "blocks_planned": 4, "stages": totals, "cpu_seconds": 8.0,
            "peak_rss": 219 << 20, "planned_peak": 400 << 20, "clipped": [], "workers": [],
            **changes,
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
