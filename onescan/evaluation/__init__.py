"""Evaluation of trained models: context lengths, needles, lm-eval tasks, generated images."""
