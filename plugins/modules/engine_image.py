#!/usr/bin/python
# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_image
short_description: Have a container image on one host, pulled or loaded from an archive
version_added: 0.1.0
description:
  - Brings the image only when it is not there, or when an archive holds another image under the same name.
  - Never starts or stops a container. A running one keeps the image it was started with.
  - Uses the C(docker) command, so nothing needs to be installed for Python on the host.
options:
  name:
    description: The image, as C(name:tag) or C(name@sha256:...).
    type: str
    required: true
  archive:
    description:
      - A file on the host, written by C(docker save), that holds the image.
      - Without it the image is pulled when it is missing.
    type: path
extends_documentation_fragment:
  - twospark.serving.attributes
author:
  - The twospark.serving founders (@twospark)
"""

EXAMPLES = r"""
- name: Pull the engine's image
  twospark.serving.engine_image:
    name: eugr/spark-vllm-b12x:nightly-20261015

- name: Load it from a copy that was saved before
  twospark.serving.engine_image:
    name: eugr/spark-vllm-b12x:nightly-20261015
    archive: /srv/images/spark-vllm-b12x.tar
"""

RETURN = r"""
id:
  description: The id of the image on this host; empty in check mode when it would be pulled.
  returned: success
  type: str
  sample: sha256:5d0da3dc976460b72c77d94c8a1ad043720b0416bfc16c52c45d4847e53fadb6
"""

import json
import os
import tarfile

from ansible.module_utils.basic import AnsibleModule


def archive_image_id(path: str, name: str) -> str | None:
    """The id of the image that an archive of ``docker save`` holds under ``name``; None when it holds no such image.

    Raises OSError, tarfile.TarError, ValueError or KeyError for a file that is no such archive.
    """
    with tarfile.open(path) as archive:
        member = archive.extractfile("manifest.json")
        if member is None:
            raise KeyError("manifest.json")
        for image in json.load(member):
            if name in (image.get("RepoTags") or []):
                # "<hash>.json" in the older layout, "blobs/sha256/<hash>" in the newer one.
                return "sha256:" + os.path.basename(str(image["Config"])).removesuffix(".json")
    return None


def main() -> None:
    """Compare, bring, report."""
    module = AnsibleModule(
        argument_spec={"name": {"type": "str", "required": True}, "archive": {"type": "path"}},
        supports_check_mode=True,
    )
    name, archive = module.params["name"], module.params["archive"]
    docker = module.get_bin_path("docker", required=not module.check_mode)
    before = _image_id(module, docker, name)
    wanted = before
    if archive:
        try:
            wanted = archive_image_id(archive, name) or ""
        except (OSError, tarfile.TarError, ValueError, KeyError) as error:
            module.fail_json(
                msg=f"vllm_image_archive {archive} is not an archive of `docker save` that can be read on this host: {error}"
            )
        if not wanted:
            module.fail_json(
                msg=f"vllm_image_archive {archive} holds no image named {name} (vllm_image). Save it anew: docker save -o FILE {name}"
            )
    changed = not before or before != wanted
    if changed and not module.check_mode:
        command = ["load", "--quiet", f"--input={archive}"] if archive else ["pull", "--quiet", name]
        status, out, err = module.run_command([docker, *command])
        if status:
            module.fail_json(
                msg=f"docker {' '.join(command)} ended with status {status}: {(err or out).strip()}"
            )
        wanted = _image_id(module, docker, name)
    module.exit_json(
        changed=changed,
        id=wanted,
        diff={"before": f"{name} {before or 'absent'}\n", "after": f"{name} {wanted or 'pulled'}\n"},
    )


def _image_id(module: AnsibleModule, docker: str | None, name: str) -> str:
    if not docker:
        return ""
    status, out, err = module.run_command([docker, "image", "inspect", "--format={{.Id}}", name])
    if status and "No such image" not in err and not module.check_mode:
        module.fail_json(
            msg=f"docker image inspect {name} ended with status {status}: {err.strip()}. Is the Docker engine running?"
        )
    return "" if status else str(out).strip()


if __name__ == "__main__":
    main()
