"""Train, evaluate and compare models: data, tasks, training, recipes, evaluation, reports.

It requires ``pip install 'onescan[train]'``. Only the command line, and `onescan` itself for
`train`, `convert` and `linearize`, import it.
"""
