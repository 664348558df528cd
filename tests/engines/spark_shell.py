"""Runs SQL in Spark: one JSON text a line in, one JSON object a line out. Started by the fixture `spark`.

PYTHONPATH=ENGINES python spark_shell.py ENGINES JDBC_URL FOLDER [CATALOG ...]
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

DRIVER = "/usr/share/java/postgresql.jar"


def start(engines: Path, url: str, folder: Path, catalogs: list[str]) -> Any:
    """Starts Spark with Iceberg catalogs of one database."""
    from pyspark.sql import SparkSession  # type: ignore[import-not-found]  # this process alone has it

    runtime = next(engines.glob("*/jars/iceberg-spark-runtime-*_2.12-*.jar"))
    jars = [DRIVER, str(runtime), str(engines / "relocated-jackson.jar")]
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.extraClassPath", os.pathsep.join(jars))
        .config("spark.sql.extensions", "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.local.dir", str(folder / "spark"))
        .config("spark.sql.warehouse.dir", str(folder / "hive"))
    )
    for name in catalogs:
        keys = {
            "": "org.apache.iceberg.spark.SparkCatalog", ".catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
            ".uri": url, ".jdbc.user": "tester", ".warehouse": f"file://{folder / name}", ".cache-enabled": "false",
            ".jdbc.schema-version": "V1",
        }  # fmt: skip
        for key, value in keys.items():
            builder = builder.config(f"spark.sql.catalog.{name}{key}", value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def add_default(session: Any, table: Any, column: str, value: float) -> None:
    """Adds a column with a default value, which Spark's SQL cannot."""
    java = session._jvm.org.apache.iceberg
    literal = java.expressions.Expressions.lit(value)
    table.updateSchema().addColumn(column, java.types.Types.DoubleType.get(), None, literal).commit()


def delete_values(session: Any, table: Any, columns: list[str], rows: list[list[Any]]) -> None:
    """Deletes rows by value (an equality delete file), as Flink does and Spark cannot."""
    java, gateway = session._jvm.org.apache.iceberg, session.sparkContext._gateway
    ids = gateway.new_array(gateway.jvm.int, len(columns))
    for i, name in enumerate(columns):
        ids[i] = table.schema().findField(name).fieldId()
    schema = table.schema().select(columns)
    path = table.location() + "/data/deleted-values.parquet"
    file = java.encryption.EncryptionUtil.plainAsEncryptedOutput(table.io().newOutputFile(path))
    made = java.data.GenericAppenderFactory(table.schema(), table.spec(), ids, schema, None)
    writer = made.newEqDeleteWriter(file, java.FileFormat.PARQUET, None)
    for row in rows:
        record = java.data.GenericRecord.create(schema)
        for name, value in zip(columns, row, strict=True):
            record.setField(name, value)
        writer.write(record)
    writer.close()
    table.newRowDelta().addDeletes(writer.toDeleteFile()).commit()


BY_JAVA = {"default": add_default, "delete": delete_values}


def main() -> None:
    """Answers until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Spark and Java print what they like
    session = start(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if isinstance(asked, dict):
                java = session._jvm.org.apache.iceberg.spark.Spark3Util
                table = java.loadIcebergTable(session._jsparkSession, asked.pop("table"))
                BY_JAVA[asked.pop("do")](session, table, **asked)
                answer: dict[str, Any] = {"rows": []}
            else:
                answer = {"rows": [list(row) for row in session.sql(asked).collect()]}
        except Exception as error:
            answer = {"error": "\n".join(str(error).split("\n")[:4])}
        print(json.dumps(answer, default=str), file=answers, flush=True)


if __name__ == "__main__":
    main()
