"""What is minimised: SFT, DPO and KTO losses, and the reference model they compare with."""
