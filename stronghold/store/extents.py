"""Which bytes of a file are taken: arithmetic alone, without torch."""

from __future__ import annotations

from bisect import insort


class Extents:
    """Deals out the bytes of a file that grows as it must, and takes them back.

    An extent begins in the first gap that holds it, else at the end. ``end_bytes`` is how long the file has to be; what
    is given back at the end makes it shorter, so that it is never longer than gaps between what is taken have made it.
    """

    def __init__(self) -> None:
        self.end_bytes = 0
        self._gaps: list[tuple[int, int]] = []
        """(begin, end), in order; no two touch, and none touches the end."""

    def place_of(self, length_bytes: int) -> int:
        """Returns where the next extent of this length would begin."""
        return next((begin for begin, end in self._gaps if end - begin >= length_bytes), self.end_bytes)

    def take(self, length_bytes: int) -> int:
        """Takes an extent and returns where it begins."""
        begin = self.place_of(length_bytes)
        for number, (gap, end) in enumerate(self._gaps):
            if gap == begin:
                self._gaps[number : number + 1] = [(begin + length_bytes, end)] if begin + length_bytes < end else []
                return begin
        self.end_bytes = begin + length_bytes
        return begin

    def give_back(self, begin: int, length_bytes: int) -> None:
        """Gives back an extent that was taken."""
        end = begin + length_bytes
        if end == begin:
            return
        joined = [gap for gap in self._gaps if gap[1] == begin or gap[0] == end]
        for gap in joined:
            self._gaps.remove(gap)
            begin, end = min(begin, gap[0]), max(end, gap[1])
        if end == self.end_bytes:
            self.end_bytes = begin
        else:
            insort(self._gaps, (begin, end))
