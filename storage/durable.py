"""Files of tables on a local disk, synced before a catalog names them: a power failure does not leave empty ones."""

import io
import os
from pathlib import Path
from typing import Any

from pyarrow.fs import LocalFileSystem
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from storage.snapshot.pyiceberg_private import place_of


class DurableFileIO(PyArrowFileIO):
    """pyiceberg's files. Those on a local disk are synced when they are closed."""

    def new_output(self, location: str) -> PyArrowFile:
        """Opens a location for writing."""
        output = super().new_output(location)
        path, files, buffer_bytes = place_of(output)
        if not isinstance(files, LocalFileSystem):
            return output
        return _DurableFile(location, path, files, buffer_bytes)


class _DurableFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> Any:
        path = Path(self._path)
        if not overwrite and path.exists():
            raise FileExistsError(f"Cannot create file, already exists: {self.location}")
        path.parent.mkdir(parents=True, exist_ok=True)
        return _SyncedFile(path.open("wb", self._buffer_size))


class _SyncedFile(io.BufferedIOBase):
    """A file that is synced before it is closed."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return int(self.file.write(data))

    def tell(self) -> int:
        return int(self.file.tell())

    def close(self) -> None:
        if self.file.closed:
            return
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
