"""Forms and form fields of the admin."""

from functools import partial
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from unfold import widgets

from config.kernel import money
from config.kernel.jsontext import MalformedJSON, parse_object, same_json, to_text

WIDGETS: dict[type[forms.Widget], type[forms.Widget]] = {
    forms.CheckboxInput: widgets.UnfoldBooleanSwitchWidget,
    forms.NumberInput: widgets.UnfoldAdminIntegerFieldWidget,
    forms.PasswordInput: widgets.UnfoldAdminPasswordWidget,
    forms.Select: widgets.UnfoldAdminSelectWidget,
    forms.SelectMultiple: widgets.UnfoldAdminCheckboxSelectMultipleWidget,
    forms.Textarea: widgets.UnfoldAdminTextareaWidget,
    forms.TextInput: widgets.UnfoldAdminTextInputWidget,
}


class StaffForm(forms.BaseForm):
    """Its own fields get Unfold's widgets. Those of a model get them from the admin."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for field in self.fields.values():
            if (widget := WIDGETS.get(type(field.widget))) is not None:
                field.widget = widget(field.widget.attrs)
                field.widget.is_required = field.required
                if isinstance(field, forms.ChoiceField):
                    field.choices = field.choices  # of the new widget too


class CreditsField(forms.CharField):
    """An amount shown in credits and cleaned to micro-credits. ``minimum`` is in micro-credits."""

    def __init__(self, *, minimum: int | None = 0, **options: Any) -> None:
        self.minimum = minimum
        super().__init__(max_length=40, **options)

    def clean(self, value: Any) -> int | None:
        text = super().clean(value)
        if text in self.empty_values:
            return None
        try:
            return money.parse(text, minimum=self.minimum, field="The amount")
        except ValueError as error:
            raise ValidationError(str(error)) from None

    def prepare_value(self, value: Any) -> Any:
        return money.to_text(value) if isinstance(value, int) else value

    def has_changed(self, initial: Any, data: Any) -> bool:
        return super().has_changed(self.prepare_value(initial), data)


class ObjectField(forms.CharField):
    """A JSON object that passes the API's strict reader (``jsontext.parse_object``); nothing means an empty one."""

    widget = forms.Textarea

    def __init__(self, **options: Any) -> None:
        super().__init__(required=False, initial=dict, strip=False, **options)

    def to_python(self, value: Any) -> Any:
        try:
            return parse_object(value)
        except MalformedJSON as error:
            raise ValidationError(error.message) from None

    def prepare_value(self, value: Any) -> str:
        return value if isinstance(value, str) else to_text(value or {}, indent=2)

    def has_changed(self, initial: Any, data: Any) -> bool:
        try:
            return not same_json(initial, self.to_python(data))
        except ValidationError:
            return True


class LinesField(forms.CharField):
    """A text of several lines as it was stored: browsers send other line breaks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"strip": False})

    def to_python(self, value: Any) -> str:
        return str(super().to_python(value)).replace("\r\n", "\n")


# A new secret. No page shows or reads the stored one, which perhaps no key decrypts. An empty field keeps it.
SecretField = partial(forms.CharField, widget=forms.PasswordInput, required=False)
