"""The errors a user can meet. Each says what is needed, what was found and what to do."""


class SequoiaError(Exception):
    """Something the user can mend: the command line prints it as one line and exits with `exit_code`."""

    exit_code = 1


class UsageError(SequoiaError, ValueError):
    """An argument is out of range or cannot be read as what it should be."""

    exit_code = 2


class FileError(SequoiaError):
    """A file is missing, damaged, or does not hold what it should."""


class ModelError(SequoiaError):
    """A model cannot be loaded, cannot be run exactly, or computed something that is no distribution."""


class VocabularyError(ModelError):
    """Draft and target do not share their token ids."""
