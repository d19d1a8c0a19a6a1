"""`FairseqBMUF` with the fields of its configuration as keywords, for tests of its methods."""

import dataclasses

from manyhands.fairseq import FairseqBMUF, FairseqBMUFConfig

FIELDS = [field.name for field in dataclasses.fields(FairseqBMUFConfig)]


def fairseq_bmuf(optimizer, **options):
    fields = {name: options.pop(name) for name in FIELDS if name in options}
    return FairseqBMUF(FairseqBMUFConfig(**fields), optimizer, **options)
