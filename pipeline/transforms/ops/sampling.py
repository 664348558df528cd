"""Sampling: a filter of rows, the second kind of transform."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

from pipeline.transforms.ops.op import Counts, Id

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pipeline.transforms.column import Column


class Sampling(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Keeps a share of the rows, chosen by a hash of their key columns and a seed.

    Rows with equal keys are kept or dropped together in every chunk, run and process. With the user as the key it
    samples users. Rows without any key are drawn one by one, by their place in the table, where it is known: they are
    not one user. Missing numbers are equal to one another, and so are 0 and -0. The hash starts as mix(seed) and
    continues as chain(hash, mix(x)) over the bits of each number or id, and after each list over its length. A row
    is kept if the upper 53 bits of its hash, as a fraction of 1, are below the rate.

    Source:
        arXiv:2108.09373, table 11. mix and chain: pipeline/transforms/kernels/hashing.py.
    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> users = Column(np.array([1, 1, 2, 3]), np.arange(5))
        >>> Sampling(inputs=("user",), rate=0.5, seed=2).keep([users]).tolist()
        [False, False, True, True]
    """

    kind: Literal["sampling"] = "sampling"
    inputs: tuple[str, ...] = Field(min_length=1)
    """Key columns."""
    rate: float = Field(gt=0.0, le=1.0)
    """Share of the keys to keep."""
    seed: Id = 0
    """Another seed keeps other keys."""

    def keep(
        self, columns: Sequence["Column"], counts: Counts | None = None, place: int | None = None
    ) -> "npt.NDArray[np.bool_]":
        """Returns which rows to keep, given the key columns. The dropped ones are counted as 'sampling rows'.

        Args:
            place: Of the first row; those of the others follow. None: all rows without a key have one hash.
        Shapes:
            columns of N rows each -> bool [N].
        """
        import numpy as np

        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.row_hashes import missing_keys, row_hashes

        hashes = row_hashes(columns, self.seed)
        if place is not None and len(missing := missing_keys(columns)):
            hashes[missing] = row_hashes([Column(place + missing)], self.seed)
        mask = (hashes >> np.uint64(11)) * 2.0**-53 < self.rate
        if counts is not None and not mask.all():
            counts["sampling rows"] += int(len(mask) - mask.sum())
        return mask
