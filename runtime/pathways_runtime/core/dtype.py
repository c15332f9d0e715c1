"""Element types, by IFRT's names and numbers (``xla.ifrt.DTypeProto.Kind``)."""

import enum


class DType(enum.IntEnum):
    """IFRT's element kinds. ``itemsize_bytes`` is that of the host representation (numpy with ml_dtypes)."""

    PRED = 1
    S8 = 2
    S16 = 3
    S32 = 4
    S64 = 5
    U8 = 6
    U16 = 7
    U32 = 8
    U64 = 9
    F16 = 10
    F32 = 11
    F64 = 12
    OPAQUE = 14
    C64 = 15
    BF16 = 16
    TOKEN = 17
    C128 = 18
    F8E5M2 = 19
    F8E4M3FN = 20
    S4 = 21
    U4 = 22
    F8E4M3B11FNUZ = 23
    F8E5M2FNUZ = 24
    F8E4M3FNUZ = 25
    S2 = 26
    U2 = 27
    F8E4M3 = 28
    F8E3M4 = 29
    F4E2M1FN = 30
    F8E8M0FNU = 31
    S1 = 32
    U1 = 33
    F6E2M3FN = 34
    F6E3M2FN = 35
    STRING = 99

    @property
    def numpy_name(self) -> str:
        """The name that ``numpy.dtype`` takes once ml_dtypes is imported.

        Raises:
            ValueError: for TOKEN, OPAQUE and STRING, which have no fixed-size host representation.
        """
        name = _NUMPY_NAMES.get(self)
        if name is None:
            raise ValueError(f"{self.name} arrays have no fixed-size host representation")
        return name

    @property
    def itemsize_bytes(self) -> int:
        """Bytes per element in a host buffer; sub-byte types take one byte each there."""
        return _ITEMSIZES[self]


_NUMPY_NAMES: dict[DType, str] = {
    DType.PRED: "bool",
    DType.S8: "int8",
    DType.S16: "int16",
    DType.S32: "int32",
    DType.S64: "int64",
    DType.U8: "uint8",
    DType.U16: "uint16",
    DType.U32: "uint32",
    DType.U64: "uint64",
    DType.F16: "float16",
    DType.F32: "float32",
    DType.F64: "float64",
    DType.BF16: "bfloat16",
    DType.C64: "complex64",
    DType.C128: "complex128",
    DType.F8E5M2: "float8_e5m2",
    DType.F8E4M3FN: "float8_e4m3fn",
    DType.F8E4M3B11FNUZ: "float8_e4m3b11fnuz",
    DType.F8E5M2FNUZ: "float8_e5m2fnuz",
    DType.F8E4M3FNUZ: "float8_e4m3fnuz",
    DType.F8E4M3: "float8_e4m3",
    DType.F8E3M4: "float8_e3m4",
    DType.F8E8M0FNU: "float8_e8m0fnu",
    DType.F4E2M1FN: "float4_e2m1fn",
    DType.F6E2M3FN: "float6_e2m3fn",
    DType.F6E3M2FN: "float6_e3m2fn",
    DType.S4: "int4",
    DType.U4: "uint4",
    DType.S2: "int2",
    DType.U2: "uint2",
    DType.S1: "int1",
    DType.U1: "uint1",
}

_WIDE_ITEMSIZES: dict[DType, int] = {
    DType.S16: 2,
    DType.U16: 2,
    DType.F16: 2,
    DType.BF16: 2,
    DType.S32: 4,
    DType.U32: 4,
    DType.F32: 4,
    DType.S64: 8,
    DType.U64: 8,
    DType.F64: 8,
    DType.C64: 8,
    DType.C128: 16,
}

#: The types that numpy has.
DTYPE_OF_NUMPY: dict[str, DType] = {name: kind for kind, name in _NUMPY_NAMES.items()}

_ITEMSIZES: dict[DType, int] = {kind: _WIDE_ITEMSIZES.get(kind, 1) for kind in _NUMPY_NAMES}
