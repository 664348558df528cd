"""Questions about Arrow types that come in a small and a large variant."""

import pyarrow as pa


def is_text(kind: pa.DataType) -> bool:
    """Tells whether a type is string or large_string.

    Example:
        >>> is_text(pa.large_string()), is_text(pa.binary())
        (True, False)
    """
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list(kind: pa.DataType) -> bool:
    """Tells whether a type is list or large_list, of any values.

    Example:
        >>> is_list(pa.large_list(pa.int64())), is_list(pa.list_(pa.int64(), 2))
        (True, False)
    """
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
