"""The RNGD binding: FuriosaAI's packages, on a card or in reference execution."""
