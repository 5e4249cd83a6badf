"""Options that make a run of several processes one process, which does the same on one device."""

ON_ONE_DEVICE = (
    "distributed.strategy=single",
    "distributed.mesh.data=1",
    "distributed.mesh.fsdp=1",
    "distributed.mesh.tensor=1",
    "distributed.offload_optimizer=false",
    "distributed.offload_parameters=false",
    "distributed.deepspeed_config=null",
    "trainer.devices=1",
    "trainer.num_nodes=1",
    "trainer.compile=false",
    "system.workers=0",
    "dataset.params.workers=null",
)
