"""Evaluation of trained models: generated images, context lengths, needles, lm-eval tasks."""
