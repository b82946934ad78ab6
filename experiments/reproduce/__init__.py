"""The papers' tables and figures, computed anew: records of what a paper says beside what comes out here."""
