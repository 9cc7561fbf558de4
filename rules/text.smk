# Text on this machine that datasets and tokenizers are made of: once it has changed, they are stale.
from mfubench.data.local_files import text_files
from mfubench.data.meta import DatasetMeta, TokenizerMeta, is_made_with


def text_of(config):
    """Files that Snakemake compares the times of; none where they are gone, which the job says, too. Not those with a
    brace in their path: Snakemake would take it for a wildcard's.
    """
    try:
        return [str(file) for file in text_files(config) if "{" not in str(file)]
    except ConfigError:
        return []


def text_of_tokenizer(wildcards):
    return text_of(STUDY.config.tokenizers[wildcards.tokenizer])


def text_of_dataset(wildcards):
    return text_of(STUDY.config.datasets[wildcards.dataset])


def tokenizer_is_made(name):
    config, folder = STUDY.config.tokenizers[name], Path(tokenizer_file(name)).parent
    return is_made_with(config, TokenizerMeta, folder)


def dataset_is_made(name):
    config, folder = STUDY.config.datasets[name], Path(dataset_file(name)).parent
    made = is_made_with(config, DatasetMeta, folder)
    return made and tokenizer_is_made(config.tokenizer)


def names_to_make(section, is_made):
    """Pattern of the names in a section of the study that have a rule. What was made of text that is gone since has
    none and stays: its rule would begin by taking it away, and then lack the text.
    """
    names = []
    for name, config in getattr(STUDY.config, section).items():
        try:
            text_files(config)
        except ConfigError as error:
            if is_made(name):
                if workflow.is_main_process:
                    print(
                        f"{section}.{name}: {error}; what was made of it stays",
                        file=sys.stderr,
                    )
                continue
        names.append(re.escape(name))
    return "|".join(names) or "none"


wildcard_constraints:
    tokenizer=names_to_make("tokenizers", tokenizer_is_made),
    dataset=names_to_make("datasets", dataset_is_made),
