"""The kernels' formats and updates in numpy, by arithmetic on values rather than on their bits.

``csrc/formats.h`` states the rules on bit patterns. Here a float is x = (1 + f) * 2**k, and the straight-line
logarithm k + 127 + f, exact in float64, takes the place of its bits; below the least normal number of a block, a
fraction of this number.
"""

import math
from dataclasses import dataclass

import numpy as np

BLOCK = 64


def nearest_bf16(x: np.ndarray) -> np.ndarray:
    """Returns float32 ``x`` rounded to bfloat16, to nearest with ties away from zero, as float32."""
    wide = x.astype(np.float64)
    finite = np.where(np.isfinite(wide), wide, 0.0)
    _, exponent = np.frexp(finite)
    quantum = np.ldexp(1.0, np.maximum(exponent, -125) - 8)  # 8 significant bits; fewer below the least normal number
    rounded = np.copysign(np.floor(np.abs(finite) / quantum + 0.5) * quantum, finite)
    rounded = np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, finite), rounded)
    return np.where(np.isfinite(wide), rounded, wide).astype(np.float32)


def steps_between(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns how many float32 numbers further from zero ``end`` is than ``start``, which has the same sign."""
    return np.abs(end).view(np.int32).astype(np.int64) - np.abs(start).view(np.int32)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What tells the two 8-bit moments apart."""

    exponent: int  # bits
    mantissa: int  # bits
    signed: bool
    element_factor: int  # of the dither
    step_factor: int

    @property
    def codes(self) -> int:
        return 2 ** (self.exponent + self.mantissa)

    @property
    def largest(self) -> float:
        return (2.0 - 2.0**-self.mantissa) * 2.0**119

    def least_normal(self, exponents: np.ndarray, n: int) -> np.ndarray:
        """Returns the base-2 logarithm of the least number that has the whole mantissa, for each of ``n`` elements."""
        return _spread(np.maximum(exponents, 20), n) - 127 - (2**self.exponent - 2)

    def decode(self, codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
        codes = codes.astype(np.int64)
        binade, mantissa = np.divmod(codes % self.codes, 2**self.mantissa)
        exponent = self.least_normal(exponents, len(codes)) + np.maximum(binade - 1, 0)
        value = np.ldexp(np.where(binade > 0, 1.0, 0.0) + mantissa / 2**self.mantissa, exponent)
        sign = np.where(codes >= self.codes, -1.0, 1.0) if self.signed else 1.0
        return (sign * value).astype(np.float32)

    def encode(self, values: np.ndarray, step: int, *, dither: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Returns codes and exponents. Without dither, codes are rounded to nearest."""
        magnitude = np.abs(values.astype(np.float64))
        magnitude = np.where(np.isnan(magnitude), self.largest, np.minimum(magnitude, self.largest))
        starts = np.arange(0, len(values), BLOCK)
        greatest = np.maximum.reduceat(level(magnitude), starts)
        exponents = np.maximum(np.floor(greatest + 2.0**-self.mantissa - 2.0**-23), 20).astype(np.uint8)
        least = self.least_normal(exponents, len(values))
        # A float32 sum with the least normal number keeps what is 2 ** -23 of it and more.
        fraction = np.rint(np.ldexp(magnitude, 23 - least)) / 2.0**23
        position = np.where(magnitude < np.ldexp(1.0, least), fraction, level(magnitude) - (least + 127) + 1)
        offset = self._dither(len(values), step) if dither else 0.5
        code = np.floor(position * 2**self.mantissa + offset)
        lowest = 0.0 if self.signed else np.where(magnitude > 0, 1.0, 0.0)
        code = np.clip(code, lowest, self.codes - 1).astype(np.int64)
        if self.signed:
            code += np.where((values < 0) & (code > 0), self.codes, 0)
        return code.astype(np.uint8), exponents

    def _dither(self, n: int, step: int) -> np.ndarray:
        word = (np.arange(n, dtype=np.uint64) * self.element_factor + step * self.step_factor % 2**32) % 2**32
        return np.floor(word / 2.0 ** (9 + self.mantissa)) / 2.0 ** (23 - self.mantissa)


FIRST = Moment(exponent=3, mantissa=4, signed=True, element_factor=0x85EBCA6B, step_factor=0x6A09E667)
SECOND = Moment(exponent=4, mantissa=4, signed=False, element_factor=0xC2B2AE35, step_factor=0x9E3779B9)


def level(magnitude: np.ndarray) -> np.ndarray:
    """Returns k + 127 + f for (1 + f) * 2**k; below the least normal number, where k stays, the fraction of it."""
    fraction, exponent = np.frexp(magnitude)
    return np.where(magnitude < 2.0**-126, magnitude * 2.0**126, exponent - 1 + 127 + (2 * fraction - 1))


def _spread(exponents: np.ndarray, n: int) -> np.ndarray:
    return np.repeat(exponents.astype(np.int64), BLOCK)[:n]


@dataclass(frozen=True, kw_only=True)
class State:
    """A weight and its 8-bit moments: float32, and uint8 codes and exponents."""

    weight: np.ndarray
    exp_avg: tuple[np.ndarray, np.ndarray]
    exp_avg_sq: tuple[np.ndarray, np.ndarray]


def adamw_8bit(
    state: State,
    grad: np.ndarray,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> State:
    """Returns the state after one step on the float32 gradient ``grad``, each operation in float32."""
    f = np.float32
    decay, step_size = f(1 - lr * weight_decay), f(lr / (1 - beta1**step))
    denom_scale = f(1 / (1 - beta2**step) ** 0.5)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        g = grad * f(grad_scale)
        m = f(beta1) * FIRST.decode(*state.exp_avg) + f(1 - beta1) * g
        v = f(beta2) * SECOND.decode(*state.exp_avg_sq) + f(1 - beta2) * (g * g)
        v = np.where(np.isnan(v), f(SECOND.largest), np.minimum(v, f(SECOND.largest)))
        denom = np.sqrt(v) * denom_scale + f(eps)
        weight = state.weight * decay - (f(step_size) * m) / denom
    assert all(array.dtype == np.float32 for array in (g, m, v, weight))
    return State(weight=weight, exp_avg=FIRST.encode(m, step), exp_avg_sq=SECOND.encode(v, step))


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns float32 ``a * b + c``, rounded once.

    The product is exact in float64; its sum with ``c`` is rounded to odd, so that rounding to float32 is the only one
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Transactions on Computers, 2008).
    """
    product, addend = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
    total = product + addend
    of_addend = total - product
    lost = (product - (total - of_addend)) + (addend - of_addend)
    even = total.view(np.int64) % 2 == 0
    outwards = np.where((lost > 0) == (total > 0), 1, -1)
    step = np.where(np.isfinite(lost) & (lost != 0) & even, outwards, 0)
    return (total.view(np.int64) + step).view(np.float64).astype(np.float32)


def as_pair(x: float) -> tuple[np.float32, np.float32]:
    """Returns ``x`` rounded towards zero, and what that lacks, at least 2**-60 of ``x``."""
    high = np.float32(x)
    if abs(float(high)) > abs(x):
        high = np.nextafter(high, np.float32(0))
    rest = max(abs(x) - abs(float(high)), abs(x) * 2.0**-60)
    return high, np.float32(math.copysign(rest, x))


def adamw_floats(
    weight: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    grad: np.ndarray,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns weight and moments after one step, all float32, each operation in the order of ``csrc/adamw.h``."""
    correction = math.sqrt(1 - beta2**step)
    _, exponent = math.frexp(grad_scale)
    scale = math.ldexp(grad_scale, 1 - exponent)
    kept1, kept1_low = as_pair(beta1)
    new1, new1_low = as_pair((1 - beta1) * scale)
    kept2, kept2_low = as_pair(beta2)
    new2, new2_low = as_pair((1 - beta2) * scale * scale)
    size, size_low = as_pair(-lr * correction / (1 - beta1**step))
    decay, decay_low = as_pair(1 - lr * weight_decay)
    with np.errstate(all="ignore"):
        g = grad * np.float32(math.ldexp(1.0, exponent - 1))
        m = fma(kept1, exp_avg, fma(new1, g, fma(new1_low, g, kept1_low * exp_avg)))
        v = fma(fma(new2, g, new2_low * g), g, fma(kept2, exp_avg_sq, kept2_low * exp_avg_sq))
        ratio = m / (np.sqrt(v) + np.float32(eps * correction))
        new = fma(decay, weight, fma(size, ratio, fma(size_low, ratio, decay_low * weight)))
    assert all(array.dtype == np.float32 for array in (g, m, v, ratio, new))
    return np.asarray(new), np.asarray(m), np.asarray(v)
