"""Whether a call of an AdamW kernel did AdamW: what benchmarks/adamw.py asks of every call that it times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stronghold import native

LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-4, 0.9, 0.999, 1e-8, 0.1
OUR_MOMENT_ULP = 1.5  # what our kernel promises of moments in fp32


@dataclass(frozen=True, kw_only=True)
class State:
    """What a call reads and changes.

    With ``remainder`` the weight is the upper half of a split float; ``copy`` is a bf16 copy of the weight.
    """

    weight: Tensor
    remainder: Tensor | None = None
    copy: Tensor | None = None
    grad: Tensor
    exp_avg: Tensor | native.Blocks
    exp_avg_sq: Tensor | native.Blocks


_LEAST_EXPONENT = 20  # of a block of 8-bit moments


class Sample:
    """The elements whose results are compared: whole blocks, spread over all, the first and the last among them."""

    def __init__(self, parameters: int, *, spans: int = 65, length: int = 8192) -> None:
        last = max(0, parameters - length)
        begins = [last * index // (spans - 1) // native.BLOCK * native.BLOCK for index in range(spans)]
        ends = [*(min(begin + length, parameters) for begin in begins[:-1]), parameters]
        self.positions = torch.cat([torch.arange(b, e) for b, e in zip(begins, ends, strict=True)]).unique()
        self.blocks, self.block_of = (self.positions // native.BLOCK).unique(return_inverse=True)


class Check:
    """Compares one call with AdamW in float64 from the values before it, at the elements of a sample.

    As in torch.optim.AdamW, after Loshchilov & Hutter, "Decoupled weight decay regularization", ICLR 2019. Our weights
    and fp32 moments are within what csrc/adamw.h derives. With 8-bit moments a weight is within two ulp of the larger
    of itself before and after, and 1e-6 of its update (before anything cancels); a code is within one of the exact
    moment, and an exponent is the least that holds its block. Of the others the errors are told, and wrong is only a
    step that was not taken: what their fp32 arithmetic does is theirs (DeepSpeed's 1 - beta2 is off by one part in
    80,000). All errors are in ulp of the larger of before, after and, of our weights, the update.
    """

    def __init__(self, state: State, sample: Sample, *, ours: bool) -> None:
        self.state, self.sample, self.ours = state, sample, ours
        self.largest: dict[str, float] = {}  # the largest error of each result, over all calls
        self._old: tuple[Tensor, Tensor, Tensor] | None = None

    def before(self) -> None:
        """Notes what the next call begins with."""
        self._old = self._read()

    def after(self, step: int) -> list[str]:
        """Returns what is wrong with the results of call number ``step``, one line each; nothing if nothing is."""
        assert self._old is not None
        state, (old, old_first, old_second) = self.state, self._old
        new, new_first, new_second = self._read()
        grad = state.grad[self.sample.positions].double()
        first = BETA1 * old_first + (1 - BETA1) * grad
        second = BETA2 * old_second + (1 - BETA2) * grad * grad
        rate = LR / (1 - BETA1**step) / ((second / (1 - BETA2**step)).sqrt() + EPS)
        weight = old * (1 - LR * WEIGHT_DECAY) - rate * first

        larger = torch.maximum(_ulp(old), _ulp(weight))
        narrow = state.weight.dtype is torch.bfloat16 and state.remainder is None
        unit = larger * 2**16 if narrow else larger
        if self.ours and isinstance(state.exp_avg, Tensor):
            terms = torch.stack([BETA1 * old_first, (1 - BETA1) * grad, first])
            moved = rate * terms.abs().amax(dim=0)
            unit = torch.maximum(larger, _ulp(moved))
            allowed = (_ulp(weight) + _ulp(rate * first)) / 2 + 6 * 2**-24 * moved
        elif self.ours:
            allowed = 2 * larger + 1e-6 * rate * (BETA1 * old_first.abs() + (1 - BETA1) * grad.abs())
        else:
            allowed = 4 * larger + 1e-3 * (weight - old).abs() + (unit / 2 if narrow else 0)
        wrong = self._judge("weight", new - weight, unit, allowed, "bf16_ulp" if narrow else "ulp")
        wrong += self._judge_moment("exp_avg", old_first, new_first, first)
        wrong += self._judge_moment("exp_avg_sq", old_second, new_second, second)
        if state.remainder is not None:
            nearest = ((new.float().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
            if not torch.equal(nearest, state.weight[self.sample.positions]):
                wrong.append("a bf16 weight is not its master rounded to nearest")
        if state.copy is not None:
            rounded = state.weight[self.sample.positions].bfloat16()
            if not torch.equal(rounded, state.copy[self.sample.positions]):
                wrong.append("a bf16 copy is not its master rounded")
        return wrong

    def _read(self) -> tuple[Tensor, Tensor, Tensor]:
        weight = self.state.weight[self.sample.positions]
        if self.state.remainder is not None:
            high = weight.view(torch.int16).to(torch.int32) << 16
            weight = (high + self.state.remainder[self.sample.positions]).view(torch.float32)
        return weight.double(), self._read_moment("exp_avg"), self._read_moment("exp_avg_sq")

    def _read_moment(self, name: str) -> Tensor:
        moment = getattr(self.state, name)
        if isinstance(moment, Tensor):
            return moment[self.sample.positions].double()
        codes = moment.codes[self.sample.positions].to(torch.int32)
        exponents = moment.exponents[self.sample.blocks][self.sample.block_of]
        if name == "exp_avg_sq":
            return _decode(codes, exponents, signed=False)
        size = _decode(codes & 127, exponents, signed=True)
        return torch.where(codes > 127, -size, size)

    def _judge(self, name: str, error: Tensor, unit: Tensor, allowed: Tensor, unit_name: str) -> list[str]:
        units = (error.abs() / unit).nan_to_num(torch.inf)
        key = f"{name}_{unit_name}"
        self.largest[key] = max(self.largest.get(key, 0.0), units.max().item())
        excess = units - allowed / unit
        at = int(excess.argmax())
        if excess[at] <= 0:
            return []
        return [
            f"{name} of element {self.sample.positions[at]} is {units[at]:.4g} {unit_name} from float64's "
            f"(allowed: {(allowed / unit)[at]:.4g})"
        ]

    def _judge_moment(self, name: str, old: Tensor, new: Tensor, exact: Tensor) -> list[str]:
        moment = getattr(self.state, name)
        if isinstance(moment, Tensor):
            unit = torch.maximum(_ulp(old), _ulp(exact))
            allowed = OUR_MOMENT_ULP * unit if self.ours else 4 * unit + 1e-4 * torch.maximum(old.abs(), exact.abs())
            return self._judge(name, new - exact, unit, allowed, "ulp")
        signed = name == "exp_avg"
        codes = moment.codes[self.sample.positions].to(torch.int32)
        exponents = moment.exponents[self.sample.blocks]
        size, exponent = codes & 127 if signed else codes, exponents[self.sample.block_of]
        # From the code's value one code up or down, whichever way the exact moment lies, along the code's sign.
        along = torch.where(size == 0, exact.abs(), torch.where(codes > 127, -exact, exact) if signed else exact)
        value, up = _decode(size, exponent, signed=signed), _decode(size + 1, exponent, signed=signed)
        down = _decode((size - 1).clamp(min=0), exponent, signed=signed)
        code = torch.where((along > value) | (size == 0), up - value, value - down)
        # Dithering rounds up or down; 2 % are for the fp32 arithmetic before it.
        wrong = self._judge(name, along - value, code, 1.02 * code, "codes")
        largest = torch.zeros(len(exponents), dtype=torch.float64)
        largest.scatter_reduce_(0, self.sample.block_of, exact.abs(), reduce="amax")
        top = _decode(torch.full_like(exponents, 127 if signed else 255, dtype=torch.int32), exponents, signed=signed)
        fits = (largest <= top * (1 + 1e-5)) & ((largest >= top / 2 * (1 - 1e-5)) | (exponents <= _LEAST_EXPONENT))
        if not bool(fits.all()):
            at = int((~fits).to(torch.int8).argmax())
            wrong.append(
                f"{name} of block {self.sample.blocks[at]} has exponent {exponents[at]}, which holds up to "
                f"{top[at]:.4g}, and its largest is {largest[at]:.4g}"
            )
        return wrong


def _decode(sizes: Tensor, exponents: Tensor, *, signed: bool) -> Tensor:
    """Returns the numbers that codes without sign (int32, they may go one past the last) stand for, in float64."""
    binade, mantissa = sizes >> 4, (sizes & 15).double() / 16
    least = exponents.to(torch.int32).clamp(min=_LEAST_EXPONENT) - 127 - (6 if signed else 14)
    return torch.where(binade == 0, mantissa, 1 + mantissa) * torch.exp2((least + (binade - 1).clamp(min=0)).double())


def _ulp(exact: Tensor) -> Tensor:
    """Returns the distance from the size of each number, rounded to fp32, to the next larger one."""
    nearest = exact.abs().float()
    return (torch.nextafter(nearest, torch.tensor(torch.inf)) - nearest).double()
