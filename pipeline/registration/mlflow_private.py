"""What MLflow gives under private names only."""

from storage.errors import importing_private, require_private

with importing_private("mlflow", "3."):
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from mlflow.tracking import MlflowClient

require_private("mlflow", "3.", {MlflowClient: ["_tracking_client"], SqlAlchemyStore: ["_hard_delete_run"]})


def erase_run(client: MlflowClient, run_id: str) -> None:
    """Removes a deleted run from the client's database. On a server it stays: `mlflow gc` there removes it."""
    store = client._tracking_client.store
    if isinstance(store, SqlAlchemyStore):
        store._hard_delete_run(run_id)
