"""A tokenizer of transformers with a few words."""

from tokenizers import ByteLevelBPETokenizer, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from onescan.inputs.tokenizer import PretrainedTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat", "dog"]


def word_tokenizer(*, framed=False, words=WORDS):
    """One id per word; framed adds [CLS] before and [SEP] after a text, as BERT's does."""
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    if framed:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "attention_mask", *(["token_type_ids"] if framed else [])],
    )


ODD = "naïve café — “quote” 漢字\n\tend \N{GRINNING FACE}!"


def byte_level_bpe():
    pairs = ByteLevelBPETokenizer()
    texts = ["the cat sat on the mat", ODD, "a café, a naïve cat"] * 9
    pairs.train_from_iterator(texts, 300, special_tokens=["<end>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=pairs._tokenizer, eos_token="<end>")


def words(**options):
    return PretrainedTokenizer("words", word_tokenizer(**options))
