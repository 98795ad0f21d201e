from miles_async import cpu_compat

cpu_compat.install()
