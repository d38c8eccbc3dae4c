"""Convert models of other libraries to native models and back, by the names of their weights.

No code of the other library runs to read a model, and nothing is unpickled. `source.py` defines a
row of the table `SOURCES` and how to read a model; `maps.py` how to relate its names and settings
to native ones in both directions; the other files contain the rows.
"""

from onescan.integrations.weights.convert import SOURCES as SOURCES
from onescan.integrations.weights.convert import convert_back as convert_back
from onescan.integrations.weights.convert import convert_model as convert_model
from onescan.integrations.weights.source import Foreign as Foreign
from onescan.integrations.weights.source import Source as Source
from onescan.integrations.weights.source import Tensors as Tensors
from onescan.integrations.weights.source import read as read
