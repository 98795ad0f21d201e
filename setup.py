"""The packages of the wheel; everything else about the project is in pyproject.toml.

`workers/` is installed as `miles_async.workers`, because `workers` is too common a name for an installed package to
claim. This works because the modules of `workers/` import each other relatively. pyproject.toml has no way to combine
package discovery with a renamed package.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["miles_async", "miles_async.*"]), "miles_async.workers"],
    package_dir={"miles_async.workers": "workers"},
)
