import a_package_that_nobody_has

Agent = a_package_that_nobody_has.Agent
