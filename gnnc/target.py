"""Which rows are too narrow for 8 bits on a backend: gathering codes takes as long as wider elements do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NarrowRows:
    """Widths up to which int8 does not pay where edges gather rows.

    A gather costs a request for every sector or line, however little of it is read, and a scale of a
    row is one request more. So FP32 stays where it takes no more of them than codes do, and bf16, whose
    error is at most half of that of 8 bits with a scale a row, stands in where it takes no more.

    Attributes:
        fp32_bytes: of an FP32 row: up to so many, aggregations and edge products stay FP32.
        codes: columns up to which codes take as long as bf16 whatever their scale; of one head, where
            edges have values a head.
        scaled: columns up to which codes do that are not all under one scale.
        extremes_scaled: whether codes pay, at some width, for an extremum of rows that are not under one
            scale.
        dot: columns up to which codes do for a dot product of both ends, each with its scale.
    """

    fp32_bytes: int = 64
    codes: int = 0
    scaled: int = 0
    extremes_scaled: bool = True
    dot: int = 0

    def pays(self, granularity: str, reduce: str, columns: int, head: int) -> bool:
        """Whether int8 makes an aggregation faster than bf16.

        Args:
            granularity: ``tensor``, ``row_pow2`` or ``row``.
            reduce: ``sum``, ``mean``, ``max`` or ``min``.
            columns: of a row.
            head: columns of one head, or of a row where edges have one value or none.
        """
        if head <= self.codes:
            return False
        if granularity == "tensor":
            return True
        return columns > self.scaled and (self.extremes_scaled or reduce in ("sum", "mean"))


CUDA = NarrowRows(fp32_bytes=16, codes=8, scaled=32, extremes_scaled=False, dot=16)
"""Rows begin on 16 bytes, and a sector is 32: measured on an H200 (docs/decisions/022)."""
