import a_package_that_nobody_has  # type: ignore[import-not-found] # the fault

Agent = a_package_that_nobody_has.Agent
