"""The paper's tables and figures from run directories, with seeds, standard errors and the protocol that was used."""
