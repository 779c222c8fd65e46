"""Element types of checkpoints by their safetensors names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """`nonfinite_mask`: an element whose bits under the mask are all set is Inf or NaN; 0: it cannot be either.
    `torch`: its attribute name in torch."""

    itemsize: int
    torch: str
    nonfinite_mask: int = 0


DTYPES = {
    "F64": Dtype(8, "float64", 0x7FF0_0000_0000_0000),
    "I64": Dtype(8, "int64"),
    "U64": Dtype(8, "uint64"),
    "F32": Dtype(4, "float32", 0x7F80_0000),
    "I32": Dtype(4, "int32"),
    "U32": Dtype(4, "uint32"),
    "BF16": Dtype(2, "bfloat16", 0x7F80),
    "F16": Dtype(2, "float16", 0x7C00),
    "I16": Dtype(2, "int16"),
    "U16": Dtype(2, "uint16"),
    "F8_E5M2": Dtype(1, "float8_e5m2", 0x7C),
    "F8_E4M3": Dtype(1, "float8_e4m3fn", 0x7F),  # the one pattern is NaN, it has no Inf
    "F8_E8M0": Dtype(1, "float8_e8m0fnu", 0xFF),
    "I8": Dtype(1, "int8"),
    "U8": Dtype(1, "uint8"),
    "BOOL": Dtype(1, "bool"),
}
