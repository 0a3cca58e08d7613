"""A layer whose parameters keep the names that they have in a whole model."""

from collections.abc import Mapping

from torch import nn


class NamedLayer(nn.Module):
    """Holds modules by their full names in a model, e.g. "model.layers.3".

    A `Pipeline` of such layers leaves the layers' numbers out of all names, so its `state_dict` has the model's names.

    >>> NamedLayer({"model.norm": nn.RMSNorm(4)}).state_dict().keys()
    odict_keys(['model.norm.weight'])
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.paths = tuple(modules)
        """The full names of the modules."""
        for path, module in modules.items():
            *outer, name = path.split(".")
            owner: nn.Module = self
            for part in outer:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.add_module(name, module)

    def module(self, path: str) -> nn.Module:
        """Return a module by its full name."""
        return self.get_submodule(path)
