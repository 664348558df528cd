"""Runs `flows.end_to_end`, which evaluates on the nodes of the cluster however few the rows are."""

import runpy

from pipeline.jobs.evaluation import parallel

if __name__ == "__main__":
    parallel.LEAST_CLUSTER_VALUES = 1
    runpy.run_module("flows.end_to_end", run_name="__main__", alter_sys=True)
