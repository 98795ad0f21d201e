"""slime's names for the `data_source` that rollout functions receive, for annotations and `isinstance`.

A run creates the object; its methods are in `pipeline/rollout_source.py`.
"""

from miles_async.pipeline.rollout_source import RolloutSource

RolloutDataSource = RolloutSource
RolloutDataSourceWithBuffer = RolloutSource
