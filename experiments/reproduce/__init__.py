"""The papers' tables and figures, reproduced: each row has the paper's number and ours."""
