"""What line charts show, for tests of the pages that onescan writes."""

from matplotlib.figure import Figure

from onescan.report import lines


def limits_drawn(monkeypatch):
    """The vertical axis' limits of each line chart drawn from now on, by what lies along it."""
    limits, chart = {}, lines.chart

    def watched(draw, **words):
        figure = Figure()
        draw(figure)
        (axes,) = figure.axes
        limits[axes.get_ylabel()] = axes.get_ylim()
        return chart(draw, **words)

    monkeypatch.setattr(lines, "chart", watched)
    return limits
