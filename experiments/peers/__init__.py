"""Other systems' own policy searches, run as their authors published them; none of their code is kept here."""
