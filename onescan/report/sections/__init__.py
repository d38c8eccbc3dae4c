"""What the page of each task shows: a sentence at the top, then its sections in their order."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from onescan.report.runs import RunGroup
from onescan.report.section import Section
from onescan.report.sections import (
    confusion,
    curves,
    diffusion_kernels,
    frequencies,
    generation_lead,
    glue_measures,
    glue_mistakes,
    image_lead,
    key_importance,
    learnt_decays,
    made_images,
    noise_errors,
    position_kernels,
    predictions,
    recall,
    recall_lead,
    speed,
    text_lead,
    writing,
)
from onescan.tasks import (
    GlueConfig,
    ImageClassificationConfig,
    ImageGenerationConfig,
    LanguageModellingConfig,
    MaskedLanguageModellingConfig,
    RecallTaskConfig,
    SequenceClassificationConfig,
    TaskConfig,
)


class Page(NamedTuple):
    """What is shown of one task.

    Attributes:
        lead: tells a stranger what was trained on what.
        sections: each looks at the runs and returns a part of the page.
    """

    lead: Callable[[RunGroup], str]
    sections: tuple[Callable[[RunGroup], Section], ...]


TEXT = Page(text_lead.lead, (curves.section, speed.section, writing.section))

PAGES: Mapping[type[TaskConfig], Page] = MappingProxyType(
    {
        ImageClassificationConfig: Page(
            lead=image_lead.lead,
            sections=(
                curves.section,
                speed.section,
                confusion.section,
                predictions.section,
                key_importance.section,
                position_kernels.section,
                frequencies.section,
                learnt_decays.section,
                diffusion_kernels.section,
            ),
        ),
        ImageGenerationConfig: Page(
            lead=generation_lead.lead,
            sections=(
                made_images.section,
                curves.section,
                noise_errors.section,
                speed.section,
                position_kernels.section,
                frequencies.section,
            ),
        ),
        LanguageModellingConfig: TEXT,
        MaskedLanguageModellingConfig: TEXT,
        RecallTaskConfig: Page(recall_lead.lead, (curves.section, speed.section, recall.section)),
        GlueConfig: Page(
            lead=text_lead.lead,
            sections=(
                glue_measures.section,
                curves.section,
                speed.section,
                glue_mistakes.section,
            ),
        ),
        SequenceClassificationConfig: Page(text_lead.lead, (curves.section, speed.section)),
    }
)
