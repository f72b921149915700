"""What nvidia-smi says of a GPU while it computes: at rest clock, power and the link's generation are others."""

from __future__ import annotations

import subprocess
import tempfile

import torch

FIELDS = (
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_event_reasons.active",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
)
PATIENCE_S = 10.0
COMMAND = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader")
"""It asks, and sets nothing."""


class Asked:
    """A question to nvidia-smi, begun while ``device`` has work, of which no thread waits for the answer."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index or 0
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe that is full would stop it)
        self._process: subprocess.Popen[bytes] | None = None
        self._error = "" if device.type == "cuda" else "nvidia-smi knows CUDA's devices alone"
        if not self._error:
            try:
                self._process = subprocess.Popen(COMMAND, stdout=self._said, stderr=subprocess.STDOUT)
            except OSError as error:
                self._error = str(error)

    def answer(self) -> dict[str, str]:
        """Returns the values by their fields, or what was said in place of them as "error"."""
        with self._said:
            if self._process is None:
                return {"error": self._error}
            try:
                code = self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                return {"error": f"nvidia-smi took more than {PATIENCE_S:g} s"}
            self._said.seek(0)
            said = self._said.read().decode(errors="replace")
        lines = [[value.strip() for value in line.split(",")] for line in said.splitlines()]
        if code == 0 and self._index < len(lines) and len(lines[self._index]) == len(FIELDS):
            return dict(zip(FIELDS, lines[self._index], strict=True))
        return {"error": f"nvidia-smi ended with {code}: {' '.join(said.split())[:300]}"}


def in_words(answer: dict[str, str]) -> str:
    """Returns what was said, in a line."""
    return ", ".join(f"{name} {value}" for name, value in answer.items())
