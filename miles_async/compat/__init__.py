"""Names, calling conventions and configuration files of other projects, one folder per project.

`tutorial/` has the classes of the tutorial on windowed FIFO. Everything in this package is based on the rest of
`miles_async`, which does not import it. pyproject.toml lists the only exceptions: modules that re-export names of this
package under the paths that users type.
"""
