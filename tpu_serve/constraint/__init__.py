"""Which tokens may come next: masks over the vocabulary that follow an answer token by token."""
