"""Rules: what they are, how they are run, and what they report.

A package registers its rules as a `RuleSet` (`rules.runner`) in a module that its `Capability`
names, and describes them in its rules.toml (`RuleText`). This package knows no capability.
"""
