"""The memory that a job needs on its devices, computed from the settings and the dimensions of the model."""
