"""Train, evaluate and compare models: data, tasks, training, recipes, evaluation, reports.

It requires ``pip install 'onescan[train]'``. The library, which is the rest of onescan, does not
import it.
"""
